// gRPC's side of ShardStore: raw frames (common/bulk/frame.h) in, raw frames out.
#pragma once

#include "grpcpp/support/server_callback.h"
#include "shard_store/service/bulk_session.h"
#include "zeroshard/v1/store.grpc.pb.h"

namespace zeroshard::store {

// Thread-safe. Outlives the server that it is registered with.
class BulkService final
    : public v1::ShardStore::WithRawCallbackMethod_Bulk<v1::ShardStore::Service> {
 public:
  explicit BulkService(OpenSession open) : open_(std::move(open)) {}

 private:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Bulk(
      grpc::CallbackServerContext* context) override;

  const OpenSession open_;
};

}  // namespace zeroshard::store
