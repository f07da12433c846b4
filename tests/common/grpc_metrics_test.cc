// Calls of every kind against a real server: what was started was handled, under the right code.
#include "common/grpc_metrics.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/grpc_server.h"
#include "common/metrics_server.h"
#include "zeroshard/v1/jobs.grpc.pb.h"
#include "zeroshard/v1/store.grpc.pb.h"

namespace zeroshard {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::system_clock;

constexpr auto kPatience = seconds(20);
constexpr int kMostBytes = 64 << 10;
constexpr char kJobs[] = "zeroshard.v1.Jobs";
const char* const kCodes[] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

// Answers when the caller has left.
class Waits : public grpc::ServerUnaryReactor {
 public:
  void OnCancel() override { Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the caller left")); }
  void OnDone() override { delete this; }
};

class WaitsWithAStream : public grpc::ServerWriteReactor<v1::LogChunk> {
 public:
  void OnCancel() override { Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the caller left")); }
  void OnDone() override { delete this; }
};

class ThreeRecords : public grpc::ServerWriteReactor<v1::StepRecord> {
 public:
  ThreeRecords() { StartWrite(&record_); }
  void OnWriteDone(bool ok) override {
    if (ok && ++written_ < 3) {
      StartWrite(&record_);
    } else {
      Finish(grpc::Status::OK);
    }
  }
  void OnDone() override { delete this; }

 private:
  v1::StepRecord record_;
  int written_ = 0;
};

class JobsStub : public v1::Jobs::CallbackService {
 public:
  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context, const v1::GetRequest* request,
                                v1::JobStatus*) override {
    int code = 0;
    EXPECT_TRUE(absl::SimpleAtoi(request->job(), &code));
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status(static_cast<grpc::StatusCode>(code), "as asked"));
    return reactor;
  }
  grpc::ServerUnaryReactor* Version(grpc::CallbackServerContext* context, const v1::VersionRequest*,
                                    v1::VersionResponse*) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext*, const v1::CancelRequest*,
                                   v1::JobStatus*) override {
    return new Waits;
  }
  grpc::ServerWriteReactor<v1::StepRecord>* History(grpc::CallbackServerContext*,
                                                    const v1::HistoryRequest*) override {
    return new ThreeRecords;
  }
  grpc::ServerWriteReactor<v1::LogChunk>* Logs(grpc::CallbackServerContext*,
                                               const v1::LogsRequest*) override {
    return new WaitsWithAStream;
  }
};

// Sends back what it gets, as bytes.
class Echo : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Echo() { StartRead(&message_); }
  void OnReadDone(bool ok) override {
    if (ok) {
      StartWrite(&message_);
    } else {
      Finish(grpc::Status::OK);
    }
  }
  void OnWriteDone(bool) override { StartRead(&message_); }
  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer message_;
};

class StoreStub : public v1::ShardStore::WithRawCallbackMethod_Bulk<v1::ShardStore::Service> {
 public:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Bulk(
      grpc::CallbackServerContext*) override {
    return new Echo;
  }
};

class GrpcMetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    GrpcServer::Options options{"127.0.0.1:0", {&jobs_, &store_}};
    options.max_message_bytes = kMostBytes;
    options.registry = registry_;
    auto server = GrpcServer::Start(options);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials());
    client_ = v1::Jobs::NewStub(channel_);
  }

  // The value of a series of a method; -1: there is none. Of a histogram its count.
  double Value(const std::string& name, const std::string& service, const std::string& method,
               const std::string& code = "") const {
    for (const prometheus::MetricFamily& family : registry_->Collect()) {
      if (family.name != name) continue;
      for (const prometheus::ClientMetric& metric : family.metric) {
        std::map<std::string, std::string> labels;
        for (const auto& label : metric.label) labels[label.name] = label.value;
        if (labels["service"] != service || labels["method"] != method || labels["code"] != code)
          continue;
        return family.type == prometheus::MetricType::Histogram
                   ? static_cast<double>(metric.histogram.sample_count)
                   : metric.counter.value;
      }
    }
    return -1;
  }
  double Started(const std::string& method, const std::string& service = kJobs) const {
    return Value("zeroshard_grpc_server_started_total", service, method);
  }
  double Handled(const std::string& method, const std::string& code,
                 const std::string& service = kJobs) const {
    return Value("zeroshard_grpc_server_handled_total", service, method, code);
  }
  double Timed(const std::string& method) const {
    return Value("zeroshard_grpc_server_handling_seconds", kJobs, method);
  }
  // A caller may have its answer a moment before the server has forgotten the call.
  void AwaitHandled(const std::string& method, const std::string& code, double count,
                    const std::string& service = kJobs) const {
    const auto handled_in_all = [&] {
      double all = 0;
      for (const char* each : kCodes) all += Handled(method, each, service);
      return all;
    };
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (
        (Handled(method, code, service) < count || handled_in_all() < Started(method, service)) &&
        std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(2));
    }
    std::string seen;
    for (const char* each : kCodes) {
      const double handled = Handled(method, each, service);
      if (handled != 0) absl::StrAppend(&seen, " ", each, "=", handled);
    }
    EXPECT_EQ(Handled(method, code, service), count) << method << " " << code << ", seen:" << seen;
    EXPECT_EQ(handled_in_all(), Started(method, service)) << method;
  }

  grpc::StatusCode Get(int code) {
    grpc::ClientContext context;
    context.set_deadline(system_clock::now() + kPatience);
    v1::GetRequest request;
    request.set_job(absl::StrCat(code));
    v1::JobStatus response;
    return client_->Get(&context, request, &response).error_code();
  }

  const std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  JobsStub jobs_;
  StoreStub store_;
  std::unique_ptr<GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Jobs::Stub> client_;
};

TEST_F(GrpcMetricsTest, EveryMethodAndCodeIsThereAtZeroBeforeTheFirstCall) {
  for (const char* method : {"Submit", "List", "Get", "Cancel", "Watch", "History", "Logs", "Nodes",
                             "Version", "Checkpoints"}) {
    EXPECT_EQ(Started(method), 0) << method;
    for (const char* code : kCodes) EXPECT_EQ(Handled(method, code), 0) << method << " " << code;
  }
  EXPECT_EQ(Timed("Get"), 0);
  EXPECT_EQ(Timed("Watch"), -1);  // a stream
  EXPECT_EQ(Started("Bulk", "zeroshard.v1.ShardStore"), 0);
  EXPECT_EQ(Started("Check", "grpc.health.v1.Health"), 0);
  EXPECT_EQ(Started("Watch", "grpc.health.v1.Health"), 0);
  EXPECT_EQ(Started("ServerReflectionInfo", "grpc.reflection.v1alpha.ServerReflection"), 0);
  EXPECT_EQ(Started("unknown", "unknown"), 0);
  EXPECT_EQ(Started("Session", "zeroshard.v1.Cluster"), -1);  // not a service of this server
}

TEST_F(GrpcMetricsTest, AnAnswerCountsUnderItsCode) {
  for (int code = 0; code <= 16; ++code) {
    EXPECT_EQ(Get(code), static_cast<grpc::StatusCode>(code));
    AwaitHandled("Get", kCodes[code], 1);
  }
  EXPECT_EQ(Started("Get"), 17);
  EXPECT_EQ(Timed("Get"), 17);
}

TEST_F(GrpcMetricsTest, ACallThatItsCallerCancelsIsHandled) {
  grpc::ClientContext context;
  std::thread cancel([&] {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (Started("Cancel") < 1 && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    context.TryCancel();
  });
  v1::JobStatus response;
  EXPECT_EQ(client_->Cancel(&context, {}, &response).error_code(), grpc::StatusCode::CANCELLED);
  cancel.join();
  AwaitHandled("Cancel", "CANCELLED", 1);
}

TEST_F(GrpcMetricsTest, ACallWhoseDeadlinePassesIsHandled) {
  grpc::ClientContext context;
  context.set_deadline(system_clock::now() + milliseconds(200));
  v1::JobStatus response;
  EXPECT_EQ(client_->Cancel(&context, {}, &response).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  AwaitHandled("Cancel", "CANCELLED", 1);  // what the handler said
}

TEST_F(GrpcMetricsTest, StreamsAreHandledWhenTheyAreOver) {
  {
    grpc::ClientContext context;
    context.set_deadline(system_clock::now() + kPatience);
    auto reader = client_->History(&context, {});
    v1::StepRecord record;
    int records = 0;
    while (reader->Read(&record)) ++records;
    EXPECT_TRUE(reader->Finish().ok());
    EXPECT_EQ(records, 3);
  }
  AwaitHandled("History", "OK", 1);
  grpc::ClientContext context;
  auto reader = client_->Logs(&context, {});
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (Started("Logs") < 1 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(Started("Logs"), 1);
  for (const char* code : kCodes) EXPECT_EQ(Handled("Logs", code), 0);  // it is still open
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  AwaitHandled("Logs", "CANCELLED", 1);
}

TEST_F(GrpcMetricsTest, StreamsOfRawBytesAreCountedAndPassUnchanged) {
  const auto store = v1::ShardStore::NewStub(channel_);
  grpc::ClientContext context;
  context.set_deadline(system_clock::now() + kPatience);
  auto stream = store->Bulk(&context);
  for (int i = 0; i < 10; ++i) {
    v1::BulkBytes out, in;
    out.GetReflection()->MutableUnknownFields(&out)->AddLengthDelimited(
        1, std::string(1000, static_cast<char>('a' + i)));
    ASSERT_TRUE(stream->Write(out));
    ASSERT_TRUE(stream->Read(&in));
    EXPECT_EQ(in.SerializeAsString(), out.SerializeAsString());
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  AwaitHandled("Bulk", "OK", 1, "zeroshard.v1.ShardStore");
}

TEST_F(GrpcMetricsTest, AMessageThatIsTooLargeLeavesNoCallOpen) {
  v1::GetRequest request;
  request.set_job(std::string(2 * kMostBytes, 'x'));
  v1::JobStatus response;
  {
    grpc::ClientContext context;
    context.set_deadline(system_clock::now() + kPatience);
    EXPECT_EQ(client_->Get(&context, request, &response).error_code(),
              grpc::StatusCode::RESOURCE_EXHAUSTED);
  }
  EXPECT_EQ(Get(0), grpc::StatusCode::OK);  // the connection lives
  AwaitHandled("Get", "OK", 1);
  EXPECT_EQ(Started("Get"), 1);

  // A stream is open when its message comes: it is over when its handler says so.
  const auto store = v1::ShardStore::NewStub(channel_);
  grpc::ClientContext context;
  context.set_deadline(system_clock::now() + kPatience);
  auto stream = store->Bulk(&context);
  v1::BulkBytes out, in;
  out.GetReflection()->MutableUnknownFields(&out)->AddLengthDelimited(
      1, std::string(2 * kMostBytes, 'x'));
  stream->Write(out);
  EXPECT_FALSE(stream->Read(&in));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  AwaitHandled("Bulk", "OK", 1, "zeroshard.v1.ShardStore");
}

TEST_F(GrpcMetricsTest, MethodsThatTheServerDoesNotHaveCountAsOne) {
  grpc::GenericStub stub(channel_);
  for (const char* path : {"/zeroshard.v1.Jobs/Nope", "/no.such.Service/Get", "/x"}) {
    grpc::ClientContext context;
    context.set_deadline(system_clock::now() + kPatience);
    grpc::CompletionQueue queue;
    grpc::ByteBuffer response;
    grpc::Status status;
    auto call = stub.PrepareUnaryCall(&context, path, grpc::ByteBuffer(), &queue);
    call->StartCall();
    call->Finish(&response, &status, &queue);
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << path;
  }
  AwaitHandled("unknown", "UNIMPLEMENTED", 3, "unknown");
  EXPECT_EQ(Started("Nope"), -1);
}

TEST_F(GrpcMetricsTest, NoCallIsLostUnderLoad) {
  constexpr int kThreads = 8, kCalls = 100;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < kCalls; ++i) Get(t % 2 == 0 ? 0 : 5);
    });
  }
  for (std::thread& thread : threads) thread.join();
  AwaitHandled("Get", "OK", kThreads * kCalls / 2);
  AwaitHandled("Get", "NOT_FOUND", kThreads * kCalls / 2);
  EXPECT_EQ(Timed("Get"), kThreads * kCalls);
}

}  // namespace
}  // namespace zeroshard
