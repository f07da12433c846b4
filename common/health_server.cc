#include "common/health_server.h"

#include <chrono>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/grpc_acceptor.h"
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
constexpr int kHandshakeMs = 5'000, kIdleMs = 60'000;
// A probe or two at a time, from a node's agent and from whoever looks.
constexpr security::ConnectionGate::Most kConnections = {
    .in_all = 128, .of_peer = 32, .burst = 64, .per_second = 20};

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
  auto listener = security::Listener::Bind(*address, kConnections, "health checks");
  if (!listener.ok()) return listener.status();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  const std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor =
      builder.experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
          grpc::InsecureServerCredentials());
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetResourceQuota(grpc::ResourceQuota("health").Resize(kMemory));
  builder.SetOption(std::make_unique<NoPlugins>());
  std::unique_ptr<HealthServer> result(new HealthServer);
  // gRPC starts no server that has nothing but its health service.
  builder.RegisterCallbackGenericService(&result->others_);
  result->server_ = builder.BuildAndStart();
  if (result->server_ == nullptr) {
    return absl::InternalError(absl::StrCat("gRPC could not start a server for health checks at ",
                                            address->ToString(),
                                            "; what it logged just before says why"));
  }
  result->listener_ = *std::move(listener);
  address->port = result->listener_->port();
  result->listener_->Serve(HandTo(acceptor));
  result->address_ = address->ToString();
  result->SetReady(false);
  return result;
}

HealthServer::~HealthServer() {
  if (server_ == nullptr) return;
  if (listener_ != nullptr) listener_->Stop();
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

void HealthServer::SetReady(bool ready) {
  server_->GetHealthCheckService()->SetServingStatus(kReadyService, ready);
}

}  // namespace zeroshard
