// A unary call that may wait for the core without holding a thread.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "common/grpc_status.h"
#include "coordinator/service/engine.h"
#include "grpcpp/support/server_callback.h"

namespace zeroshard::coordinator {

// Owns itself from Start until gRPC is done with it.
class UnaryCall : public grpc::ServerUnaryReactor, public std::enable_shared_from_this<UnaryCall> {
 public:
  // Sends `event` to the engine; when the answer comes, `fill` may complete the response.
  template <typename E>
  static UnaryCall* Start(Engine* engine, E event,
                          std::function<void(const Reply&)> fill = nullptr) {
    auto call = std::shared_ptr<UnaryCall>(new UnaryCall(engine));
    call->self_ = call;
    const RequestId id = engine->Call(std::move(event), [call, fill](const Reply& reply) {
      if (fill && reply.status.ok()) fill(reply);
      call->Finish(ToGrpcStatus(reply.status));
    });
    bool cancelled = false;
    {
      std::lock_guard<std::mutex> lock(call->mutex_);
      call->request_ = id;
      cancelled = call->cancelled_;
    }
    if (cancelled) call->GiveUp(id);
    return call.get();
  }

  void OnCancel() override {
    RequestId id = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      cancelled_ = true;
      id = request_;
    }
    if (id != 0) GiveUp(id);
  }

  void OnDone() override { self_.reset(); }

 private:
  explicit UnaryCall(Engine* engine) : engine_(engine) {}

  void GiveUp(RequestId id) {
    if (engine_->Drop(id)) Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the caller left"));
  }

  Engine* const engine_;
  std::shared_ptr<UnaryCall> self_;
  std::mutex mutex_;
  RequestId request_ = 0;
  bool cancelled_ = false;
};

}  // namespace zeroshard::coordinator
