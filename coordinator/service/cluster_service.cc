#include "coordinator/service/cluster_service.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "common/security/authoriser.h"
#include "coordinator/service/unary_call.h"

namespace zeroshard::coordinator {
namespace {

// Messages that a member has not taken; heartbeats are answered one by one, so that more than this
// means that it does not read.
constexpr size_t kMaxUnsent = 1000;
// Likewise: the map of a large job is a megabyte, and every step of it is told to every store.
constexpr size_t kMaxUnsentBytes = 256 << 20;

// One member's stream. Owns itself until gRPC is done with it.
class SessionStream : public grpc::ServerBidiReactor<v1::MemberMessage, v1::CoordinatorMessage>,
                      public SessionSink {
 public:
  static SessionStream* Open(Engine* engine, grpc::CallbackServerContext* context) {
    auto stream = std::shared_ptr<SessionStream>(new SessionStream(engine, context));
    stream->self_ = stream;
    stream->id_ = engine->OpenSession(stream);
    stream->StartRead(&stream->incoming_);
    return stream.get();
  }

  void Send(v1::CoordinatorMessage message) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closing_) return;
    const size_t bytes = message.ByteSizeLong();
    const bool full = unsent_bytes_ + bytes > kMaxUnsentBytes && !unsent_.empty();
    if (full || unsent_.size() >= kMaxUnsent) {
      unsent_.erase(unsent_.begin() + 1, unsent_.end());  // the first is being written
      lock.unlock();
      Close();
      return;
    }
    unsent_bytes_ += bytes;
    unsent_.push_back(std::move(message));
    if (unsent_.size() == 1) StartWrite(&unsent_.front());
  }

  void Close() override {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    FinishIfIdle();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Close();
      return;
    }
    if (const absl::Status known = Known(); !known.ok()) {
      v1::CoordinatorMessage answer;
      answer.mutable_refused()->set_reason(std::string(known.message()));
      Send(std::move(answer));
      Close();
      return;
    }
    engine_->MemberSays(id_, std::move(incoming_));
    incoming_.Clear();
    StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard<std::mutex> lock(mutex_);
    unsent_bytes_ -= std::min(unsent_bytes_, unsent_.front().ByteSizeLong());
    unsent_.pop_front();
    if (!ok) {
      closing_ = true;
      unsent_.clear();
    }
    if (!unsent_.empty()) {
      StartWrite(&unsent_.front());
    } else if (closing_) {
      FinishIfIdle();
    }
  }

  void OnCancel() override {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    if (unsent_.size() > 1) unsent_.erase(unsent_.begin() + 1, unsent_.end());
    FinishIfIdle();
  }

  void OnDone() override {
    engine_->SessionEnded(id_);
    self_.reset();
  }

 private:
  SessionStream(Engine* engine, grpc::CallbackServerContext* context)
      : engine_(engine), context_(context) {}

  // A member is what its certificate says.
  absl::Status Known() const {
    if (!incoming_.has_hello()) return absl::OkStatus();
    const v1::Hello& hello = incoming_.hello();
    const bool worker = hello.kind() == v1::MEMBER_KIND_WORKER;
    return security::CheckMember(*context_->auth_context(),
                                 worker ? security::Role::kWorker : security::Role::kStore,
                                 hello.name());
  }

  void FinishIfIdle() {
    if (!unsent_.empty() || finished_) return;
    finished_ = true;
    Finish(grpc::Status::OK);
  }

  Engine* const engine_;
  grpc::CallbackServerContext* const context_;  // gRPC's, until OnDone
  SessionId id_ = 0;
  std::shared_ptr<SessionStream> self_;
  v1::MemberMessage incoming_;
  std::mutex mutex_;
  std::deque<v1::CoordinatorMessage> unsent_;  // the first is being written
  size_t unsent_bytes_ = 0;
  bool closing_ = false;
  bool finished_ = false;
};

}  // namespace

grpc::ServerBidiReactor<v1::MemberMessage, v1::CoordinatorMessage>* ClusterService::Session(
    grpc::CallbackServerContext* context) {
  return SessionStream::Open(engine_, context);
}

grpc::ServerUnaryReactor* ClusterService::PutKey(grpc::CallbackServerContext* context,
                                                 const v1::PutKeyRequest* request,
                                                 v1::PutKeyResponse* response) {
  return UnaryCall::Start(engine_, coordinator::PutKey{0, *request});
}

grpc::ServerUnaryReactor* ClusterService::GetKey(grpc::CallbackServerContext* context,
                                                 const v1::GetKeyRequest* request,
                                                 v1::GetKeyResponse* response) {
  return UnaryCall::Start(engine_, coordinator::GetKey{0, *request},
                          [response](const Reply& reply) { response->set_value(reply.text); });
}

grpc::ServerUnaryReactor* ClusterService::Barrier(grpc::CallbackServerContext* context,
                                                  const v1::BarrierRequest* request,
                                                  v1::BarrierResponse* response) {
  return UnaryCall::Start(engine_, ArriveAtBarrier{0, *request});
}

grpc::ServerUnaryReactor* ClusterService::ReportSteps(grpc::CallbackServerContext* context,
                                                      const v1::ReportStepsRequest* request,
                                                      v1::ReportStepsResponse* response) {
  return UnaryCall::Start(
      engine_, coordinator::ReportSteps{0, *request},
      [response](const Reply& reply) { response->set_committed_step(reply.number); });
}

grpc::ServerUnaryReactor* ClusterService::CommitStep(grpc::CallbackServerContext* context,
                                                     const v1::CommitStepRequest* request,
                                                     v1::CommitStepResponse* response) {
  const absl::Duration asked = engine_->Elapsed();
  return UnaryCall::Start(engine_, coordinator::CommitStep{0, *request},
                          [this, asked, response](const Reply& reply) {
                            // The core has made these bytes.
                            response->mutable_decision()->ParseFromString(reply.text);
                            engine_->CountCommit(asked);
                          });
}

grpc::ServerUnaryReactor* ClusterService::ReportEnd(grpc::CallbackServerContext* context,
                                                    const v1::ReportEndRequest* request,
                                                    v1::ReportEndResponse* response) {
  return UnaryCall::Start(engine_, coordinator::ReportEnd{0, *request});
}

grpc::ServerUnaryReactor* ClusterService::ReportExit(grpc::CallbackServerContext* context,
                                                     const v1::ReportExitRequest* request,
                                                     v1::ReportExitResponse* response) {
  return UnaryCall::Start(engine_, coordinator::ReportExit{0, *request});
}

}  // namespace zeroshard::coordinator
