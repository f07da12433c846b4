// A coordinator's Jobs service that says what a test tells it to, on a free port.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "zeroshard/v1/jobs.grpc.pb.h"

namespace zeroshard {

inline v1::StepRecord Step(uint64_t step, double loss) {
  v1::StepRecord record;
  record.set_step(step);
  record.set_loss(loss);
  record.set_grad_norm(1.5);
  record.set_learning_rate(1e-3);
  record.set_tokens(4096);
  record.set_seconds(0.5);
  return record;
}

inline v1::JobStatus Job(const std::string& name, v1::JobState state, const std::string& reason) {
  v1::JobStatus status;
  status.set_name(name);
  status.set_run_id(name + "-1");
  status.set_state(state);
  status.set_reason(reason);
  status.set_steps(2);
  status.set_workers(2);
  return status;
}

class FakeJobs : public v1::Jobs::Service {
 public:
  // What one call of Watch sends, and how it ends.
  struct WatchScript {
    std::vector<v1::WatchUpdate> updates;
    grpc::Status end;
  };

  FakeJobs() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeJobs() override { server_->Shutdown(); }

  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  // Set before the call, read after it.
  std::vector<v1::JobStatus> jobs;
  std::vector<v1::StepRecord> history;
  std::vector<v1::LogChunk> logs;
  std::vector<v1::Node> nodes;
  v1::CheckpointsResponse checkpoints;
  std::deque<WatchScript> watches;
  grpc::Status submit_error;
  std::string queued_reason = "waits for 2 workers";
  std::string version = "9.8.7";
  v1::SubmitRequest submitted;
  v1::CancelRequest cancelled;
  std::vector<v1::WatchRequest> watch_requests;

  void AddWatch(const v1::JobStatus& status, const std::vector<v1::StepRecord>& records,
                const grpc::Status& end = grpc::Status::OK) {
    v1::WatchUpdate update;
    *update.mutable_status() = status;
    for (const auto& record : records) *update.add_records() = record;
    watches.push_back({{update}, end});
  }

 private:
  grpc::Status Find(const std::string& name, v1::JobStatus* status) {
    for (const v1::JobStatus& job : jobs) {
      if (job.name() == name || job.run_id() == name) {
        *status = job;
        return grpc::Status::OK;
      }
    }
    return {grpc::StatusCode::NOT_FOUND, absl::StrCat("no job ", name, "; there are licences")};
  }

  grpc::Status Submit(grpc::ServerContext*, const v1::SubmitRequest* request,
                      v1::SubmitResponse* response) override {
    submitted = *request;
    if (!submit_error.ok()) return submit_error;
    response->set_run_id(request->spec().name() + "-1");
    *response->mutable_status() = Job(request->spec().name(), v1::JOB_STATE_QUEUED, queued_reason);
    jobs.push_back(response->status());
    return grpc::Status::OK;
  }
  grpc::Status List(grpc::ServerContext*, const v1::ListRequest*,
                    v1::ListResponse* response) override {
    for (const auto& job : jobs) *response->add_jobs() = job;
    return grpc::Status::OK;
  }
  grpc::Status Get(grpc::ServerContext*, const v1::GetRequest* request,
                   v1::JobStatus* response) override {
    return Find(request->job(), response);
  }
  grpc::Status Cancel(grpc::ServerContext*, const v1::CancelRequest* request,
                      v1::JobStatus* response) override {
    cancelled = *request;
    grpc::Status status = Find(request->job(), response);
    response->set_state(v1::JOB_STATE_CANCELLED);
    return status;
  }
  grpc::Status Watch(grpc::ServerContext*, const v1::WatchRequest* request,
                     grpc::ServerWriter<v1::WatchUpdate>* writer) override {
    watch_requests.push_back(*request);
    if (watches.empty()) return {grpc::StatusCode::INTERNAL, "the test has no more to watch"};
    const WatchScript script = watches.front();
    watches.pop_front();
    for (const auto& update : script.updates) writer->Write(update);
    return script.end;
  }
  grpc::Status History(grpc::ServerContext*, const v1::HistoryRequest* request,
                       grpc::ServerWriter<v1::StepRecord>* writer) override {
    v1::JobStatus status;
    if (grpc::Status found = Find(request->job(), &status); !found.ok()) return found;
    for (const auto& record : history) writer->Write(record);
    return grpc::Status::OK;
  }
  grpc::Status Logs(grpc::ServerContext*, const v1::LogsRequest* request,
                    grpc::ServerWriter<v1::LogChunk>* writer) override {
    for (const auto& chunk : logs) {
      if (!request->has_rank() || request->rank() == chunk.rank()) writer->Write(chunk);
    }
    return grpc::Status::OK;
  }
  grpc::Status Nodes(grpc::ServerContext*, const v1::NodesRequest*,
                     v1::NodesResponse* response) override {
    for (const auto& node : nodes) *response->add_nodes() = node;
    return grpc::Status::OK;
  }
  grpc::Status Checkpoints(grpc::ServerContext*, const v1::CheckpointsRequest* request,
                           v1::CheckpointsResponse* response) override {
    v1::JobStatus status;
    *response = checkpoints;
    return Find(request->job(), &status);
  }
  grpc::Status Version(grpc::ServerContext*, const v1::VersionRequest*,
                       v1::VersionResponse* response) override {
    response->set_version(version);
    return grpc::Status::OK;
  }

  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace zeroshard
