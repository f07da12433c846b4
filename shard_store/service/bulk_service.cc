#include "shard_store/service/bulk_service.h"

#include <utility>

#include "common/grpc_status.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "shard_store/service/bulk_stream.h"

namespace zeroshard::store {
namespace {

constexpr absl::Duration kLettingGo = absl::Seconds(10);

// A session that counts while it is open.
class CountedSession final : public BulkSession {
 public:
  CountedSession(StreamLimits::Place place, std::unique_ptr<BulkSession> session)
      : session_(std::move(session)), place_(std::move(place)) {}

  absl::Status Push(const bulk::Header& header,
                    absl::Span<const absl::Span<const char>> parts) override {
    return session_->Push(header, parts);
  }
  void WaitForPush(const bulk::Header& header,
                   std::function<void(const absl::Status&)> ready) override {
    session_->WaitForPush(header, std::move(ready));
  }
  void Pull(const bulk::Header& header, PullHandler handler) override {
    session_->Pull(header, std::move(handler));
  }
  absl::Status State(const bulk::Header& header, absl::Span<float> values) override {
    return session_->State(header, values);
  }

 private:
  const std::unique_ptr<BulkSession> session_;
  const StreamLimits::Place place_;  // given back before others hear that the session is closed
};

OpenSession Counted(std::shared_ptr<StreamLimits> limits, OpenSession open) {
  return [limits = std::move(limits), open = std::move(open)](
             const v1::BulkHello& hello, std::function<void(const absl::Status&)> on_end)
             -> absl::StatusOr<std::unique_ptr<BulkSession>> {
    ZS_ASSIGN_OR_RETURN(StreamLimits::Place place, limits->Take(hello));
    ZS_ASSIGN_OR_RETURN(std::unique_ptr<BulkSession> session, open(hello, std::move(on_end)));
    return std::make_unique<CountedSession>(std::move(place), std::move(session));
  };
}

// A call that ends as it begins.
class Refusal final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Refusal(const absl::Status& status) { Finish(ToGrpcStatus(status)); }

 private:
  void OnDone() override { delete this; }
};

}  // namespace

BulkService::BulkService(OpenSession open, const StreamLimits::Most& most)
    : limits_(StreamLimits::Make(most)),
      open_(Counted(limits_, std::move(open))),
      pins_(std::make_shared<PinTally>()) {}

BulkService::~BulkService() {
  if (pins_->AwaitNone(kLettingGo)) return;
  LogError("gRPC still holds parameters that were sent ", absl::FormatDuration(kLettingGo), " ago");
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* BulkService::Bulk(
    grpc::CallbackServerContext* context) {
  absl::StatusOr<StreamLimits::Place> place = limits_->TakeSilent();
  if (!place.ok()) return new Refusal(place.status());
  return BulkStream::Start(context, &open_, pins_, *std::move(place));
}

}  // namespace zeroshard::store
