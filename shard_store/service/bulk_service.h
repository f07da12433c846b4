// gRPC's side of ShardStore: raw frames (common/bulk/frame.h) in, raw frames out.
#pragma once

#include "grpcpp/support/server_callback.h"
#include "shard_store/service/bulk_session.h"
#include "shard_store/service/stream_limits.h"
#include "zeroshard/v1/store.grpc.pb.h"

namespace zeroshard::store {

class PinTally;

// Thread-safe. Outlives the server that it is registered with.
class BulkService final
    : public v1::ShardStore::WithRawCallbackMethod_Bulk<v1::ShardStore::Service> {
 public:
  explicit BulkService(OpenSession open, const StreamLimits::Most& most = {});
  // Waits until gRPC has let go of all parameters that were sent, so that what holds them may go.
  ~BulkService() override;

 private:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Bulk(
      grpc::CallbackServerContext* context) override;

  const std::shared_ptr<StreamLimits> limits_;
  const OpenSession open_;
  const std::shared_ptr<PinTally> pins_;
};

}  // namespace zeroshard::store
