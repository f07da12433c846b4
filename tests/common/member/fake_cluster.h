// A coordinator without a mind of its own: answers as the test tells it and remembers what it
// heard. Serves on a free port; may be stopped and started again on the same one.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "common/grpc_server.h"
#include "grpcpp/server_context.h"
#include "zeroshard/v1/cluster.grpc.pb.h"

namespace zeroshard {

class FakeCluster : public v1::Cluster::Service {
 public:
  // How long a test waits for something that must happen.
  static constexpr std::chrono::seconds kPatience{30};

  FakeCluster() { Start(); }
  ~FakeCluster() override { Stop(); }

  void Start() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = false;
    }
    GrpcServer::Options options;
    options.listen = address_;
    options.services = {this};
    auto server = GrpcServer::Start(options);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    address_ = server_->address();
  }
  // Every call under way breaks, as when the process dies.
  void Stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    server_.reset();
  }
  const std::string& address() const { return address_; }

  struct State {
    // What the test sets.
    std::function<v1::CoordinatorMessage(const v1::Hello&)> answer = [](const v1::Hello&) {
      return Welcome(1);
    };
    bool acknowledge = true;
    size_t world = 1;  // ranks that make a barrier complete
    grpc::Status report_steps_status;
    grpc::Status barrier_status;
    // The decision of a step; null: it never comes.
    std::function<v1::StepDecision(const v1::CommitStepRequest&)> commit;
    // What was heard.
    std::vector<v1::Hello> hellos;
    std::vector<v1::Heartbeat> heartbeats;
    std::vector<v1::LogLines> logs;
    std::vector<std::string> goodbyes;
    std::map<std::string, std::string> keys;
    std::map<std::string, std::set<uint32_t>> barriers;
    std::vector<v1::StepRecord> steps;
    std::vector<v1::CheckpointRecord> checkpoints;
    std::vector<v1::SampleRecord> samples;
    std::vector<v1::ReportEndRequest> ends;
    std::vector<v1::CommitStepRequest> commits;
    std::vector<v1::StoreReport> reports;
    int sessions = 0;  // open now
  };
  // Runs `change` on the state.
  void With(const std::function<void(State&)>& change) {
    std::lock_guard<std::mutex> lock(mutex_);
    change(state_);
    changed_.notify_all();
  }
  // Waits until `holds` is true of the state; false when it is not within the test's patience.
  bool Await(const std::function<bool(const State&)>& holds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return holds(state_); });
  }
  // To every open session.
  void Send(const v1::CoordinatorMessage& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Stream* stream : streams_) stream->Write(message);
  }

  static v1::CoordinatorMessage Welcome(uint64_t term, uint32_t timeout_ms = 20000) {
    v1::CoordinatorMessage message;
    message.mutable_welcome()->set_cluster_id("fake");
    message.mutable_welcome()->set_term(term);
    message.mutable_welcome()->set_heartbeat_interval_ms(10);
    message.mutable_welcome()->set_member_timeout_ms(timeout_ms);
    return message;
  }
  static v1::CoordinatorMessage Refusal(const std::string& reason, bool fenced) {
    v1::CoordinatorMessage message;
    message.mutable_refused()->set_reason(reason);
    message.mutable_refused()->set_fenced(fenced);
    return message;
  }

 private:
  using Stream = grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::MemberMessage>;

  grpc::Status Session(grpc::ServerContext* context, Stream* stream) override {
    v1::MemberMessage message;
    if (!stream->Read(&message) || !message.has_hello()) return grpc::Status::OK;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      state_.hellos.push_back(message.hello());
      ++state_.sessions;
      changed_.notify_all();
      const v1::CoordinatorMessage answer = state_.answer(message.hello());
      stream->Write(answer);
      if (answer.has_refused()) {
        --state_.sessions;
        return grpc::Status::OK;
      }
      streams_.insert(stream);
    }
    while (stream->Read(&message)) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (message.has_heartbeat()) {
        state_.heartbeats.push_back(message.heartbeat());
        v1::CoordinatorMessage ack;
        ack.mutable_ack()->set_sequence(message.heartbeat().sequence());
        if (state_.acknowledge) stream->Write(ack);
      }
      if (message.has_log()) state_.logs.push_back(message.log());
      if (message.has_store()) state_.reports.push_back(message.store());
      if (message.has_goodbye()) state_.goodbyes.push_back(message.goodbye().reason());
      changed_.notify_all();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.erase(stream);
    --state_.sessions;
    changed_.notify_all();
    return grpc::Status::OK;
  }

  grpc::Status PutKey(grpc::ServerContext*, const v1::PutKeyRequest* request,
                      v1::PutKeyResponse*) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [at, added] = state_.keys.emplace(request->key(), request->value());
    changed_.notify_all();
    if (!added && at->second != request->value()) {
      return {grpc::StatusCode::ALREADY_EXISTS, "another value is there"};
    }
    return grpc::Status::OK;
  }

  grpc::Status GetKey(grpc::ServerContext* context, const v1::GetKeyRequest* request,
                      v1::GetKeyResponse* response) override {
    return Wait(context, request->timeout_ms(), "key " + request->key(), [&] {
      const auto found = state_.keys.find(request->key());
      if (found == state_.keys.end()) return false;
      response->set_value(found->second);
      return true;
    });
  }

  grpc::Status Barrier(grpc::ServerContext* context, const v1::BarrierRequest* request,
                       v1::BarrierResponse*) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!state_.barrier_status.ok()) return state_.barrier_status;
      state_.barriers[request->name()].insert(request->fence().rank());
      changed_.notify_all();
    }
    return Wait(context, request->timeout_ms(), "barrier " + request->name(),
                [&] { return state_.barriers[request->name()].size() >= state_.world; });
  }

  grpc::Status ReportSteps(grpc::ServerContext*, const v1::ReportStepsRequest* request,
                           v1::ReportStepsResponse*) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!state_.report_steps_status.ok()) return state_.report_steps_status;
    for (const v1::StepRecord& record : request->records()) {
      // Idempotent by step.
      if (state_.steps.empty() || state_.steps.back().step() < record.step()) {
        state_.steps.push_back(record);
      }
    }
    for (const auto& record : request->checkpoints()) state_.checkpoints.push_back(record);
    for (const auto& record : request->samples()) state_.samples.push_back(record);
    changed_.notify_all();
    return grpc::Status::OK;
  }

  grpc::Status CommitStep(grpc::ServerContext* context, const v1::CommitStepRequest* request,
                          v1::CommitStepResponse* response) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      state_.commits.push_back(*request);
      changed_.notify_all();
    }
    return Wait(context, 60000, "commit", [&] {
      if (!state_.commit) return false;
      *response->mutable_decision() = state_.commit(*request);
      return true;
    });
  }

  grpc::Status ReportEnd(grpc::ServerContext*, const v1::ReportEndRequest* request,
                         v1::ReportEndResponse*) override {
    std::lock_guard<std::mutex> lock(mutex_);
    state_.ends.push_back(*request);
    changed_.notify_all();
    return grpc::Status::OK;
  }

  grpc::Status Wait(grpc::ServerContext* context, uint32_t timeout_ms, const std::string& what,
                    const std::function<bool()>& done) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (!done()) {
      if (stopping_) return {grpc::StatusCode::UNAVAILABLE, "stopping"};
      if (context->IsCancelled()) return grpc::Status::CANCELLED;
      if (std::chrono::steady_clock::now() >= end) {
        return {grpc::StatusCode::DEADLINE_EXCEEDED, what + ": missing rank 1"};
      }
      changed_.wait_for(lock, std::chrono::milliseconds(20));
    }
    return grpc::Status::OK;
  }

  std::string address_ = "127.0.0.1:0";
  std::unique_ptr<GrpcServer> server_;
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_;
  std::set<Stream*> streams_;
  bool stopping_ = false;
};

}  // namespace zeroshard
