// Cluster, as gRPC calls it: messages to events, replies to answers. Nothing is decided here.
#pragma once

#include "coordinator/service/engine.h"
#include "zeroshard/v1/cluster.grpc.pb.h"

namespace zeroshard::coordinator {

// Thread-safe. Calls that wait hold no thread. The engine outlives the server that this is
// registered with.
class ClusterService : public v1::Cluster::CallbackService {
 public:
  explicit ClusterService(Engine* engine) : engine_(engine) {}

  grpc::ServerBidiReactor<v1::MemberMessage, v1::CoordinatorMessage>* Session(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* PutKey(grpc::CallbackServerContext* context,
                                   const v1::PutKeyRequest* request,
                                   v1::PutKeyResponse* response) override;
  grpc::ServerUnaryReactor* GetKey(grpc::CallbackServerContext* context,
                                   const v1::GetKeyRequest* request,
                                   v1::GetKeyResponse* response) override;
  grpc::ServerUnaryReactor* Barrier(grpc::CallbackServerContext* context,
                                    const v1::BarrierRequest* request,
                                    v1::BarrierResponse* response) override;
  grpc::ServerUnaryReactor* ReportSteps(grpc::CallbackServerContext* context,
                                        const v1::ReportStepsRequest* request,
                                        v1::ReportStepsResponse* response) override;
  grpc::ServerUnaryReactor* CommitStep(grpc::CallbackServerContext* context,
                                       const v1::CommitStepRequest* request,
                                       v1::CommitStepResponse* response) override;
  grpc::ServerUnaryReactor* ReportEnd(grpc::CallbackServerContext* context,
                                      const v1::ReportEndRequest* request,
                                      v1::ReportEndResponse* response) override;
  grpc::ServerUnaryReactor* ReportExit(grpc::CallbackServerContext* context,
                                       const v1::ReportExitRequest* request,
                                       v1::ReportExitResponse* response) override;

 private:
  Engine* const engine_;
};

}  // namespace zeroshard::coordinator
