// A stream to a client that is written as a run goes on. Holds no thread while there is nothing
// new.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "coordinator/service/engine.h"
#include "grpcpp/support/server_callback.h"

namespace zeroshard::coordinator {

// A subclass says in Next what to write. Owns itself from Start until gRPC is done with it.
template <typename Message>
class Follower : public grpc::ServerWriteReactor<Message>, public Watcher {
 public:
  // Follows `run_id`; an empty one is finished with `status` at once.
  static Follower* Start(std::shared_ptr<Follower> follower, const std::string& run_id,
                         const grpc::Status& status = grpc::Status::OK) {
    Follower* const raw = follower.get();
    raw->self_ = follower;
    if (run_id.empty()) {
      raw->FinishOnce(status);
    } else {
      raw->run_id_ = run_id;
      raw->engine_->Watch(run_id, std::move(follower));
    }
    return raw;
  }

  void Notify() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      dirty_ = true;
      if (busy_) return;
      busy_ = true;
    }
    Pump();
  }

  void Close() override {
    End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the coordinator is shutting down"));
  }
  void OnCancel() override { End(grpc::Status(grpc::StatusCode::CANCELLED, "the caller left")); }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      FinishOnce(grpc::Status(grpc::StatusCode::CANCELLED, "the caller left"));
      return;
    }
    Pump();
  }

  void OnDone() override {
    if (!run_id_.empty()) engine_->Unwatch(run_id_, this);
    self_.reset();
  }

 protected:
  enum class Step { kWrite, kWait, kDone };

  explicit Follower(Engine* engine) : engine_(engine) {}

  // Fills `message` to be written, or says that there is nothing now, or that it is over with
  // `status`. Never called by two threads at once.
  virtual Step Next(Message* message, grpc::Status* status) = 0;

  Engine* const engine_;
  std::string run_id_;

 private:
  void End(const grpc::Status& status) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!ended_) end_status_ = status;
      ended_ = true;
      if (busy_) return;
      busy_ = true;
    }
    FinishOnce(status);
  }

  void Pump() {
    while (true) {
      grpc::Status status;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        dirty_ = false;
        if (ended_) status = end_status_;
      }
      if (!status.ok()) return FinishOnce(status);
      message_.Clear();
      switch (Next(&message_, &status)) {
        case Step::kWrite:
          this->StartWrite(&message_);
          return;
        case Step::kDone:
          return FinishOnce(status);
        case Step::kWait: {
          std::lock_guard<std::mutex> lock(mutex_);
          if (dirty_ || ended_) continue;
          busy_ = false;
          return;
        }
      }
    }
  }

  void FinishOnce(const grpc::Status& status) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      busy_ = true;
      if (finished_) return;
      finished_ = true;
    }
    this->Finish(status);
  }

  std::shared_ptr<Follower> self_;
  Message message_;
  std::mutex mutex_;
  bool dirty_ = false;
  bool busy_ = false;  // a thread is in Pump, a write is under way, or it is over
  bool ended_ = false;
  bool finished_ = false;
  grpc::Status end_status_;
};

}  // namespace zeroshard::coordinator
