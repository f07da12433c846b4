// Jobs, as gRPC calls it: what the client uses.
#pragma once

#include <string>

#include "coordinator/service/disk_work.h"
#include "coordinator/service/engine.h"
#include "zeroshard/v1/jobs.grpc.pb.h"

namespace zeroshard::coordinator {

// Thread-safe. Streams that wait hold no thread. The engine outlives the server.
class JobsService : public v1::Jobs::CallbackService {
 public:
  explicit JobsService(Engine* engine) : engine_(engine), disk_(kMostDiskWork) {}

  grpc::ServerUnaryReactor* Submit(grpc::CallbackServerContext* context,
                                   const v1::SubmitRequest* request,
                                   v1::SubmitResponse* response) override;
  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context,
                                 const v1::ListRequest* request,
                                 v1::ListResponse* response) override;
  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context, const v1::GetRequest* request,
                                v1::JobStatus* response) override;
  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* context,
                                   const v1::CancelRequest* request,
                                   v1::JobStatus* response) override;
  grpc::ServerWriteReactor<v1::WatchUpdate>* Watch(grpc::CallbackServerContext* context,
                                                   const v1::WatchRequest* request) override;
  grpc::ServerWriteReactor<v1::StepRecord>* History(grpc::CallbackServerContext* context,
                                                    const v1::HistoryRequest* request) override;
  grpc::ServerWriteReactor<v1::LogChunk>* Logs(grpc::CallbackServerContext* context,
                                               const v1::LogsRequest* request) override;
  grpc::ServerUnaryReactor* Nodes(grpc::CallbackServerContext* context,
                                  const v1::NodesRequest* request,
                                  v1::NodesResponse* response) override;
  grpc::ServerUnaryReactor* Version(grpc::CallbackServerContext* context,
                                    const v1::VersionRequest* request,
                                    v1::VersionResponse* response) override;
  grpc::ServerUnaryReactor* Checkpoints(grpc::CallbackServerContext* context,
                                        const v1::CheckpointsRequest* request,
                                        v1::CheckpointsResponse* response) override;

 private:
  static constexpr size_t kMostDiskWork = 16;

  Engine* const engine_;
  DiskWork disk_;
};

}  // namespace zeroshard::coordinator
