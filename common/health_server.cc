#include "common/health_server.h"

#include <chrono>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/net_address.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/impl/server_builder_option.h"
#include "grpcpp/impl/server_builder_plugin.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"

namespace zeroshard {
namespace {

// Whoever reaches the port may call it: it gets little to fill.
constexpr size_t kMemory = size_t{8} << 20;
constexpr int kMaxMessageBytes = 4096;
constexpr int kMaxStreams = 16;  // of a connection

// Reflection is a plugin of every server in a process that links it.
class NoPlugins : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->clear();
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<HealthServer>> HealthServer::Start(const std::string& listen) {
  absl::StatusOr<HostPort> address = ParseHostPort(listen);
  if (!address.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--health-listen: ", address.status().message()));
  }
  if (absl::Status probed = ProbeListen(*address, "health checks"); !probed.ok()) return probed;
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address->ToString(), grpc::InsecureServerCredentials(), &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetResourceQuota(grpc::ResourceQuota("health").Resize(kMemory));
  builder.SetOption(std::make_unique<NoPlugins>());
  std::unique_ptr<HealthServer> result(new HealthServer);
  // gRPC starts no server that has nothing but its health service.
  builder.RegisterCallbackGenericService(&result->others_);
  result->server_ = builder.BuildAndStart();
  if (result->server_ == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", address->ToString(),
        " for health checks: the address was taken a moment ago, or listening was refused by the "
        "system; choose another port with --health-listen"));
  }
  address->port = port;
  result->address_ = address->ToString();
  result->SetReady(false);
  return result;
}

HealthServer::~HealthServer() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

void HealthServer::SetReady(bool ready) {
  server_->GetHealthCheckService()->SetServingStatus(kReadyService, ready);
}

}  // namespace zeroshard
