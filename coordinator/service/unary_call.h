// A unary call that may wait for the core, or for a disk before, without holding a thread.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "common/grpc_status.h"
#include "coordinator/service/disk_work.h"
#include "coordinator/service/engine.h"
#include "grpcpp/support/server_callback.h"

namespace zeroshard::coordinator {

// Owns itself from its start until gRPC is done with it.
class UnaryCall : public grpc::ServerUnaryReactor, public std::enable_shared_from_this<UnaryCall> {
 public:
  using Fill = std::function<void(const Reply&)>;

  // Sends `event` to the engine; when the answer comes, `fill` may complete the response.
  template <typename E>
  static UnaryCall* Start(Engine* engine, E event, Fill fill = nullptr) {
    const auto call = Make(engine, /*waits_for_disk=*/false);
    call->Send(std::move(event), std::move(fill));
    return call.get();
  }

  // Runs `work` on the disk first, for at most `patience`; where it was OK and the caller is still
  // there, `next` goes on with the call: by Send, or by Answer.
  static UnaryCall* StartAfter(Engine* engine, DiskWork* disk, const std::string& what,
                               absl::Duration patience, std::function<absl::Status()> work,
                               std::function<void(UnaryCall*)> next) {
    const auto call = Make(engine, /*waits_for_disk=*/true);
    disk->Run(what, patience, std::move(work),
              [call, next = std::move(next)](const absl::Status& status) {
                if (!call->LeaveDisk()) return;
                if (status.ok()) {
                  next(call.get());
                } else {
                  call->Answer(status);
                }
              });
    return call.get();
  }

  template <typename E>
  void Send(E event, Fill fill) {
    const RequestId id =
        engine_->Call(std::move(event), [call = shared_from_this(), fill](const Reply& reply) {
          if (fill && reply.status.ok()) fill(reply);
          call->Answer(reply.status);
        });
    bool cancelled = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      request_ = id;
      cancelled = cancelled_;
    }
    if (cancelled) GiveUp(id);
  }

  void Answer(const absl::Status& status) { Finish(ToGrpcStatus(status)); }

  void OnCancel() override {
    RequestId id = 0;
    bool waited = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      cancelled_ = true;
      id = request_;
      waited = std::exchange(waits_for_disk_, false);
    }
    if (waited) Answer(absl::CancelledError("the caller left"));
    if (id != 0) GiveUp(id);
  }

  void OnDone() override { self_.reset(); }

 private:
  UnaryCall(Engine* engine, bool waits_for_disk)
      : engine_(engine), waits_for_disk_(waits_for_disk) {}

  static std::shared_ptr<UnaryCall> Make(Engine* engine, bool waits_for_disk) {
    auto call = std::shared_ptr<UnaryCall>(new UnaryCall(engine, waits_for_disk));
    call->self_ = call;
    return call;
  }

  // False when the caller left meanwhile and was answered.
  bool LeaveDisk() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(waits_for_disk_, false);
  }

  void GiveUp(RequestId id) {
    if (engine_->Drop(id)) Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the caller left"));
  }

  Engine* const engine_;
  std::shared_ptr<UnaryCall> self_;
  std::mutex mutex_;
  RequestId request_ = 0;
  bool waits_for_disk_;
  bool cancelled_ = false;
};

}  // namespace zeroshard::coordinator
