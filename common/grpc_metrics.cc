#include "common/grpc_metrics.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/impl/server_builder_option.h"
#include "grpcpp/impl/server_builder_plugin.h"
#include "grpcpp/impl/server_initializer.h"
#include "prometheus/counter.h"
#include "prometheus/histogram.h"

namespace zeroshard {
namespace {

using grpc::experimental::InterceptionHookPoints;
using Clock = std::chrono::steady_clock;

// By number: what grpc::StatusCode and absl::StatusCode call them.
constexpr std::array<const char*, 17> kCodes = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

// Most calls take less than a millisecond; barriers, keys and commits wait for others.
const prometheus::Histogram::BucketBoundaries kSeconds = {0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03,
                                                          0.1,    0.3,    1,     3,     10,   30};

// Services of every server that protobuf's pool need not know; unary: true.
struct BuiltIn {
  const char* service;
  const char* method;
  bool unary;
};
constexpr BuiltIn kBuiltIn[] = {
    {"grpc.health.v1.Health", "Check", true},
    {"grpc.health.v1.Health", "Watch", false},
    {"grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", false}};

struct Method {
  prometheus::Counter* started = nullptr;
  std::array<prometheus::Counter*, kCodes.size()> handled{};
  prometheus::Histogram* seconds = nullptr;  // of a unary one
};

// The methods of one server; complete before the server starts, read by its calls from then on.
class Methods {
 public:
  explicit Methods(std::shared_ptr<prometheus::Registry> registry)
      : registry_(std::move(registry)),
        started_(prometheus::BuildCounter()
                     .Name("zeroshard_grpc_server_started_total")
                     .Help("Calls that arrived, by service and method.")
                     .Register(*registry_)),
        handled_(prometheus::BuildCounter()
                     .Name("zeroshard_grpc_server_handled_total")
                     .Help("Calls that are over, by service, method and the code that the server "
                           "answered with.")
                     .Register(*registry_)),
        seconds_(prometheus::BuildHistogram()
                     .Name("zeroshard_grpc_server_handling_seconds")
                     .Help("From the arrival of a unary call until it was over.")
                     .Register(*registry_)) {
    unknown_ = Make("unknown", "unknown", /*unary=*/false);
    for (const BuiltIn& known : kBuiltIn) Add(known.service, known.method, known.unary);
  }

  void AddService(const std::string& name) {
    const google::protobuf::ServiceDescriptor* service =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
    for (int m = 0; service != nullptr && m < service->method_count(); ++m) {
      const google::protobuf::MethodDescriptor& method = *service->method(m);
      Add(name, method.name(), !method.client_streaming() && !method.server_streaming());
    }
  }

  const Method* Find(const char* path) const {
    const auto found = methods_.find(path);
    return found == methods_.end() ? &unknown_ : &found->second;
  }

 private:
  void Add(const std::string& service, const std::string& method, bool unary) {
    const std::string path = absl::StrCat("/", service, "/", method);
    if (!methods_.contains(path)) methods_.emplace(path, Make(service, method, unary));
  }

  Method Make(const std::string& service, const std::string& method, bool unary) {
    Method made;
    made.started = &started_.Add({{"service", service}, {"method", method}});
    for (size_t code = 0; code < kCodes.size(); ++code) {
      made.handled[code] =
          &handled_.Add({{"service", service}, {"method", method}, {"code", kCodes[code]}});
    }
    if (unary) made.seconds = &seconds_.Add({{"service", service}, {"method", method}}, kSeconds);
    return made;
  }

  const std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Family<prometheus::Counter>& started_;
  prometheus::Family<prometheus::Counter>& handled_;
  prometheus::Family<prometheus::Histogram>& seconds_;
  Method unknown_;
  std::unordered_map<std::string, Method> methods_;
};

// One call. gRPC deletes it when the call is over, which is then counted.
class Call : public grpc::experimental::Interceptor {
 public:
  Call(std::shared_ptr<const Methods> methods, const char* path)
      : methods_(std::move(methods)), method_(methods_->Find(path)) {
    method_->started->Increment();
  }
  ~Call() override {
    method_->handled[code_]->Increment();
    if (method_->seconds == nullptr) return;
    method_->seconds->Observe(std::chrono::duration<double>(Clock::now() - start_).count());
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      const int code = batch->GetSendStatus().error_code();
      const bool known = code >= 0 && code < static_cast<int>(kCodes.size());
      code_ = static_cast<size_t>(known ? code : grpc::StatusCode::UNKNOWN);
    }
    batch->Proceed();
  }

 private:
  const std::shared_ptr<const Methods> methods_;
  const Method* const method_;
  const Clock::time_point start_ = Clock::now();
  size_t code_ = static_cast<size_t>(grpc::StatusCode::CANCELLED);
};

class Factory : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(std::shared_ptr<const Methods> methods) : methods_(std::move(methods)) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return new Call(methods_, info->method());
  }

 private:
  const std::shared_ptr<const Methods> methods_;
};

// The only way to learn which services a builder has: as gRPC's own reflection does.
class Plugin : public grpc::ServerBuilderPlugin {
 public:
  explicit Plugin(std::shared_ptr<Methods> methods) : methods_(std::move(methods)) {}
  std::string name() override { return "zeroshard_grpc_metrics"; }
  // After the services were registered, and before the first call.
  void InitServer(grpc::ServerInitializer* server) override {
    for (const std::string& service : *server->GetServiceList()) methods_->AddService(service);
    methods_ = nullptr;
  }
  void Finish(grpc::ServerInitializer*) override {}
  void ChangeArguments(const std::string&, void*) override {}

 private:
  std::shared_ptr<Methods> methods_;
};

class Option : public grpc::ServerBuilderOption {
 public:
  explicit Option(std::shared_ptr<Methods> methods) : methods_(std::move(methods)) {}
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->push_back(std::make_unique<Plugin>(methods_));
  }

 private:
  const std::shared_ptr<Methods> methods_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CountCalls(
    grpc::ServerBuilder* builder, std::shared_ptr<prometheus::Registry> registry) {
  auto methods = std::make_shared<Methods>(std::move(registry));
  builder->SetOption(std::make_unique<Option>(methods));
  return std::make_unique<Factory>(std::move(methods));
}

}  // namespace zeroshard
