#include "shard_store/service/bulk_service.h"

#include "common/log.h"
#include "shard_store/service/bulk_stream.h"

namespace zeroshard::store {
namespace {

constexpr absl::Duration kLettingGo = absl::Seconds(10);

}  // namespace

BulkService::BulkService(OpenSession open)
    : open_(std::move(open)), pins_(std::make_shared<PinTally>()) {}

BulkService::~BulkService() {
  if (pins_->AwaitNone(kLettingGo)) return;
  LogError("gRPC still holds parameters that were sent ", absl::FormatDuration(kLettingGo), " ago");
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* BulkService::Bulk(
    grpc::CallbackServerContext* context) {
  return BulkStream::Start(context, &open_, pins_);
}

}  // namespace zeroshard::store
