// Says to a supervisor whether a program is alive and whether it is ready: grpc.health.v1 in plain
// text, on a port of its own, because probes have no certificates.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/security/listener.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/server.h"

namespace zeroshard {

// Health services by name: "" is SERVING for as long as the process answers, whatever its peers
// do; kReadyService is what SetReady said last, NOT_SERVING before. Others are NOT_FOUND.
// Thread-safe after Start.
class HealthServer {
 public:
  static constexpr char kReadyService[] = "ready";
  // What --help says of --health-listen.
  static constexpr char kOptionHelp[] =
      "Where to answer gRPC health checks in plain text, for probes, host:port: service \"\" while "
      "the process is alive, \"ready\" while it can be used. Default: nowhere but on --listen.";

  // `listen` is host:port, port 0 takes a free one.
  // UNAVAILABLE: the address is taken. INVALID_ARGUMENT: no address of this host.
  static absl::StatusOr<std::unique_ptr<HealthServer>> Start(const std::string& listen);

  ~HealthServer();
  HealthServer(const HealthServer&) = delete;
  HealthServer& operator=(const HealthServer&) = delete;

  void SetReady(bool ready);
  // host:port with the port that was bound.
  const std::string& address() const { return address_; }

 private:
  HealthServer() = default;

  grpc::CallbackGenericService others_;  // refuses whatever else is called; outlives the server
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<security::Listener> listener_;  // bounds connections; stops before the server
  std::string address_;
};

}  // namespace zeroshard
