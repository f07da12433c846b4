#include "common/grpc_server.h"

#include <algorithm>
#include <chrono>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "common/grpc_acceptor.h"
#include "common/grpc_log.h"
#include "common/grpc_metrics.h"
#include "common/net_address.h"
#include "common/status_macros.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"

namespace zeroshard {
namespace {

// What one connection may ask for at once.
constexpr int kMostStreams = 256;
// Of all headers of a call, compressed or not.
constexpr int kMostMetadataBytes = 8 << 10;
// A peer that connects and says nothing, or not enough.
constexpr int kHandshakeMs = 10'000;

std::shared_ptr<const security::Security> SecurityOf(const GrpcServer::Options& options) {
  return options.security != nullptr ? options.security : security::ProcessSecurity();
}

void SetDuration(grpc::ServerBuilder* builder, const char* argument, absl::Duration duration) {
  if (duration == absl::InfiniteDuration()) return;
  const int64_t ms = absl::ToInt64Milliseconds(duration);
  builder->AddChannelArgument(argument, static_cast<int>(std::clamp<int64_t>(ms, 1, INT32_MAX)));
}

void SetLimits(grpc::ServerBuilder* builder, const GrpcServer::Options& options) {
  builder->SetMaxReceiveMessageSize(options.max_message_bytes);
  builder->SetMaxSendMessageSize(options.max_message_bytes);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMostStreams);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMostMetadataBytes);
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  SetDuration(builder, GRPC_ARG_MAX_CONNECTION_AGE_MS, options.connection_age);
  SetDuration(builder, GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, options.connection_grace);
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const Options& options) {
  ZS_ASSIGN_OR_RETURN(auto listener, Listen(options));
  return Start(options, std::move(listener));
}

absl::StatusOr<std::unique_ptr<security::Listener>> GrpcServer::Listen(const Options& options) {
  const absl::StatusOr<HostPort> address = ParseHostPort(options.listen);
  if (!address.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--listen: ", address.status().message()));
  }
  ZS_RETURN_IF_ERROR(SecurityOf(options)->CheckListen(*address, "--listen"));
  return security::Listener::Bind(*address, options.connections, "gRPC");
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const Options& options, std::unique_ptr<security::Listener> listener) {
  ZS_ASSIGN_OR_RETURN(HostPort address, ParseHostPort(options.listen));
  GuardGrpcLog();
  static std::once_flag plugins;
  std::call_once(plugins, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });

  grpc::ServerBuilder builder;
  std::unique_ptr<GrpcServer> result(new GrpcServer);
  std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor =
      builder.experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
          SecurityOf(options)->ServerCredentials());
  SetLimits(&builder, options);
  // Clients ping on idle connections to notice a cut link; the default answers the third ping
  // within five minutes with GOAWAY too_many_pings.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 500);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  for (const auto& [key, value] : options.arguments) builder.AddChannelArgument(key, value);
  for (grpc::Service* service : options.services) builder.RegisterService(service);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  if (options.registry != nullptr) interceptors.push_back(CountCalls(&builder, options.registry));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  result->server_ = builder.BuildAndStart();
  if (result->server_ == nullptr) {
    return absl::InternalError(absl::StrCat("gRPC could not start a server for ",
                                            address.ToString(),
                                            "; what it logged just before says why"));
  }
  result->listener_ = std::move(listener);
  address.port = result->port_ = result->listener_->port();
  result->listener_->Serve(HandTo(acceptor));
  result->address_ = address.ToString();
  result->SetServing(true);
  return result;
}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

void GrpcServer::SetServing(bool serving) {
  if (grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService()) {
    health->SetServingStatus(serving);
  }
}

void GrpcServer::Shutdown(absl::Duration grace) {
  if (server_ == nullptr) return;
  if (listener_ != nullptr) listener_->Stop();
  server_->Shutdown(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(grace));
  server_->Wait();
}

}  // namespace zeroshard
