// The coordinator over loopback gRPC, with workers that are stubs in this process.
#pragma once

#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/grpc_server.h"
#include "common/metrics_server.h"
#include "common/random_id.h"
#include "coordinator/core/sqlite_log.h"
#include "coordinator/service/cluster_service.h"
#include "coordinator/service/jobs_service.h"
#include "prometheus/text_serializer.h"
#include "tests/common/temp_folder.h"

namespace zeroshard::coordinator {

inline constexpr auto kPatience = std::chrono::seconds(60);

inline void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() + kPatience);
}

inline std::shared_ptr<grpc::Channel> Dial(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxSendMessageSize(-1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

// A coordinator on a data folder; a second one made on the same folder is its next life.
class Coordinator {
 public:
  explicit Coordinator(const std::string& data_dir,
                       const std::function<void(Engine::Options*)>& adjust = {})
      : registry(MakeRegistry("coordinator")) {
    auto log = SqliteLog::Open(data_dir + "/coordinator.db");
    EXPECT_TRUE(log.ok()) << log.status();
    Engine::Options options;
    options.data_dir = data_dir;
    options.clock = &SystemClock::Get();
    options.registry = registry.get();
    if (adjust) adjust(&options);
    auto started = Engine::Start(options, *std::move(log));
    EXPECT_TRUE(started.ok()) << started.status();
    engine = *std::move(started);
    cluster = std::make_unique<ClusterService>(engine.get());
    jobs = std::make_unique<JobsService>(engine.get());
    auto listening = GrpcServer::Start({"127.0.0.1:0", {cluster.get(), jobs.get()}});
    EXPECT_TRUE(listening.ok()) << listening.status();
    server = *std::move(listening);
    channel = Dial(server->address());
    client = v1::Jobs::NewStub(channel);
  }
  ~Coordinator() {
    engine->Stop();
    server->Shutdown(absl::Seconds(5));
  }

  grpc::Status Submit(const v1::JobSpec& spec, v1::SubmitResponse* response,
                      const std::string& resume_from = "") {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::SubmitRequest request;
    *request.mutable_spec() = spec;
    request.set_resume_from(resume_from);
    return client->Submit(&context, request, response);
  }
  v1::JobStatus Get(const std::string& job) {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::GetRequest request;
    request.set_job(job);
    v1::JobStatus status;
    const grpc::Status got = client->Get(&context, request, &status);
    EXPECT_TRUE(got.ok()) << got.error_message();
    return status;
  }
  // Follows a job to its end; the steps that were seen, and the last status.
  std::pair<v1::JobStatus, std::vector<uint64_t>> WatchToTheEnd(const std::string& job,
                                                                uint64_t after = 0) {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::WatchRequest request;
    request.set_job(job);
    request.set_follow(true);
    request.set_after_step(after);
    auto reader = client->Watch(&context, request);
    v1::WatchUpdate update;
    v1::JobStatus last;
    std::vector<uint64_t> steps;
    samples.clear();
    while (reader->Read(&update)) {
      for (const v1::StepRecord& record : update.records()) steps.push_back(record.step());
      for (const v1::SampleRecord& sample : update.samples()) {
        samples.push_back(absl::StrCat(sample.step(), ":", sample.prompt(), sample.text()));
      }
      last = update.status();
    }
    EXPECT_TRUE(reader->Finish().ok());
    return {last, steps};
  }
  std::string Metrics() {
    std::vector<prometheus::MetricFamily> families = registry->Collect();
    for (prometheus::MetricFamily& family : engine->plan_metrics()->Collect()) {
      families.push_back(std::move(family));
    }
    return prometheus::TextSerializer().Serialize(families);
  }

  std::vector<std::string> samples;  // that the last WatchToTheEnd saw
  std::shared_ptr<prometheus::Registry> registry;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<ClusterService> cluster;
  std::unique_ptr<JobsService> jobs;
  std::unique_ptr<GrpcServer> server;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Jobs::Stub> client;
};

class FakeWorker {
 public:
  explicit FakeWorker(const std::string& name) {
    hello_.set_kind(v1::MEMBER_KIND_WORKER);
    hello_.set_name(name);
    hello_.set_incarnation(RandomId());
    hello_.set_host("localhost");
    hello_.set_pid(4711);
  }
  ~FakeWorker() { Disconnect(); }

  void Connect(const Coordinator& coordinator, bool running = false) {
    Disconnect();
    stub_ = v1::Cluster::NewStub(Dial(coordinator.server->address()));
    context_ = std::make_unique<grpc::ClientContext>();
    SetDeadline(context_.get());
    stream_ = stub_->Session(context_.get());
    v1::MemberMessage message;
    *message.mutable_hello() = hello_;
    if (running) *message.mutable_hello()->mutable_running() = fence_;
    ASSERT_TRUE(stream_->Write(message));
    const v1::CoordinatorMessage welcome = Read();
    ASSERT_TRUE(welcome.has_welcome()) << welcome.ShortDebugString();
  }
  void Disconnect() {
    if (!stream_) return;
    stream_->WritesDone();
    context_->TryCancel();
    stream_->Finish();
    stream_.reset();
  }
  v1::CoordinatorMessage Read() {
    v1::CoordinatorMessage message;
    EXPECT_TRUE(stream_->Read(&message));
    return message;
  }
  void TakeAssignment() {
    const v1::CoordinatorMessage message = Read();
    ASSERT_TRUE(message.has_assign()) << message.ShortDebugString();
    assign_ = message.assign();
    fence_.set_member(hello_.name());
    fence_.set_incarnation(hello_.incarnation());
    fence_.set_run_id(assign_.run_id());
    fence_.set_generation(assign_.generation());
    fence_.set_rank(assign_.rank());
  }
  void Say(const v1::MemberMessage& message) { ASSERT_TRUE(stream_->Write(message)); }
  // Idle, acknowledged.
  void BeatIdle() {
    v1::MemberMessage message;
    message.mutable_heartbeat()->set_sequence(1);
    Say(message);
    ASSERT_TRUE(Read().has_ack());
  }

  grpc::Status Barrier(const std::string& name) {
    v1::BarrierRequest request;
    *request.mutable_fence() = fence_;
    request.set_name(name);
    request.set_timeout_ms(30000);
    v1::BarrierResponse response;
    grpc::ClientContext context;
    SetDeadline(&context);
    return stub_->Barrier(&context, request, &response);
  }
  grpc::Status Put(const std::string& key, const std::string& value) {
    v1::PutKeyRequest request;
    *request.mutable_fence() = fence_;
    request.set_key(key);
    request.set_value(value);
    v1::PutKeyResponse response;
    grpc::ClientContext context;
    SetDeadline(&context);
    return stub_->PutKey(&context, request, &response);
  }
  grpc::Status GetKey(const std::string& key, std::string* value,
                      std::chrono::milliseconds patience = kPatience) {
    v1::GetKeyRequest request;
    *request.mutable_fence() = fence_;
    request.set_key(key);
    request.set_timeout_ms(30000);
    v1::GetKeyResponse response;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + patience);
    const grpc::Status status = stub_->GetKey(&context, request, &response);
    *value = response.value();
    return status;
  }
  grpc::Status Steps(uint64_t from, uint64_t to, uint64_t* committed) {
    v1::ReportStepsRequest request;
    *request.mutable_fence() = fence_;
    for (uint64_t step = from; step <= to; ++step) {
      v1::StepRecord& record = *request.add_records();
      record.set_step(step);
      record.set_loss(8.0 / step);
      record.set_tokens(64);
    }
    v1::ReportStepsResponse response;
    grpc::ClientContext context;
    SetDeadline(&context);
    const grpc::Status status = stub_->ReportSteps(&context, request, &response);
    *committed = response.committed_step();
    return status;
  }
  grpc::Status Report(const v1::ReportStepsRequest& what) {
    v1::ReportStepsRequest request = what;
    *request.mutable_fence() = fence_;
    v1::ReportStepsResponse response;
    grpc::ClientContext context;
    SetDeadline(&context);
    return stub_->ReportSteps(&context, request, &response);
  }
  // Rank 0's request at the end of an offloaded job's step.
  grpc::Status Commit(uint64_t step, uint64_t epoch, v1::StepDecision* decision) {
    v1::CommitStepRequest request;
    *request.mutable_fence() = fence_;
    v1::StepRecord& record = *request.mutable_record();
    record.set_step(step);
    record.set_loss(8.0 / static_cast<double>(step));
    record.set_grad_norm(1);
    record.set_tokens(64);
    request.set_epoch(epoch);
    request.set_next_sample(step * 4);
    request.set_samples(1000);
    v1::CommitStepResponse response;
    grpc::ClientContext context;
    SetDeadline(&context);
    const grpc::Status status = stub_->CommitStep(&context, request, &response);
    *decision = response.decision();
    return status;
  }
  grpc::Status EndSaved(uint64_t step) {
    v1::ReportEndRequest request;
    *request.mutable_fence() = fence_;
    request.set_error_code("CANCELLED");
    request.set_message(absl::StrCat("saved step ", step));
    v1::ReportEndResponse response;
    grpc::ClientContext context;
    SetDeadline(&context);
    return stub_->ReportEnd(&context, request, &response);
  }
  grpc::Status End(bool completed, const std::string& message = "", bool nonfinite = false) {
    v1::ReportEndRequest request;
    *request.mutable_fence() = fence_;
    request.set_completed(completed);
    if (!completed) request.set_error_code("INTERNAL");
    request.set_message(message);
    request.set_nonfinite(nonfinite);
    v1::ReportEndResponse response;
    grpc::ClientContext context;
    SetDeadline(&context);
    return stub_->ReportEnd(&context, request, &response);
  }

  const v1::Assign& assign() const { return assign_; }
  const v1::Fence& fence() const { return fence_; }

 private:
  v1::Hello hello_;
  v1::Assign assign_;
  v1::Fence fence_;
  std::unique_ptr<v1::Cluster::Stub> stub_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::MemberMessage, v1::CoordinatorMessage>> stream_;
};

inline v1::JobSpec Spec(uint32_t workers, uint64_t steps) {
  v1::JobSpec spec;
  spec.set_name("demo");
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_architecture("gpt2");
  model.set_hidden_size(64);
  model.set_layers(1);
  model.set_heads(2);
  model.set_sequence_length(16);
  model.set_vocab_size(256);
  spec.mutable_data()->add_train("/usr/share/common-licenses");
  spec.mutable_data()->set_tokenizer("bytes");
  spec.mutable_resources()->set_workers(workers);
  spec.set_train_batch_size(4);
  spec.set_train_micro_batch_size_per_gpu(2);
  spec.set_steps(steps);
  spec.mutable_optimizer()->set_type("AdamW");
  return spec;
}

class ServiceTest : public ::testing::Test {
 protected:
  // Two workers at the start barrier of job "demo".
  void StartDemo(Coordinator& coordinator, uint64_t steps) {
    w0.Connect(coordinator);
    w1.Connect(coordinator);
    v1::SubmitResponse response;
    const grpc::Status submitted = coordinator.Submit(Spec(2, steps), &response);
    ASSERT_TRUE(submitted.ok()) << submitted.error_message();
    w0.TakeAssignment();
    w1.TakeAssignment();
    BothAt("start");
  }
  void BothAt(const std::string& barrier) {
    grpc::Status other;
    std::thread thread([&] { other = w1.Barrier(barrier); });
    const grpc::Status mine = w0.Barrier(barrier);
    thread.join();
    EXPECT_TRUE(mine.ok()) << mine.error_message();
    EXPECT_TRUE(other.ok()) << other.error_message();
  }

  TempFolder folder;
  FakeWorker w0{"worker-0"};
  FakeWorker w1{"worker-1"};
  uint64_t committed = 0;
};

}  // namespace zeroshard::coordinator
