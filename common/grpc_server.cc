#include "common/grpc_server.h"

#include <chrono>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "common/grpc_metrics.h"
#include "common/net_address.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const Options& options) {
  absl::StatusOr<HostPort> address = ParseHostPort(options.listen);
  if (!address.ok()) return address.status();
  // gRPC says only "no address added"; the probe says why, and sees a host of which one address is
  // taken and another free, which gRPC would serve half of.
  if (absl::Status probed = ProbeListen(*address, "gRPC"); !probed.ok()) return probed;

  static std::once_flag plugins;
  std::call_once(plugins, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });

  grpc::ServerBuilder builder;
  std::unique_ptr<GrpcServer> result(new GrpcServer);
  builder.AddListeningPort(address->ToString(), grpc::InsecureServerCredentials(), &result->port_);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.SetMaxSendMessageSize(options.max_message_bytes);
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
  if (result->server_ == nullptr || result->port_ == 0) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", address->ToString(),
        " for gRPC: the address was taken a moment ago, or listening was refused by the system; "
        "choose another port (port 0 takes a free one)"));
  }
  address->port = result->port_;
  result->address_ = address->ToString();
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
  server_->Shutdown(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(grace));
  server_->Wait();
}

}  // namespace zeroshard
