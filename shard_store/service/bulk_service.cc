#include "shard_store/service/bulk_service.h"

#include "shard_store/service/bulk_stream.h"

namespace zeroshard::store {

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* BulkService::Bulk(
    grpc::CallbackServerContext* context) {
  return BulkStream::Start(&open_);
}

}  // namespace zeroshard::store
