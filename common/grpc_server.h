// A gRPC server as every daemon runs it: TLS and who may call what, health checking, reflection,
// limits and keepalive set once.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/security/listener.h"
#include "common/security/security.h"
#include "grpcpp/server.h"
#include "grpcpp/support/config.h"

namespace prometheus {
class Registry;
}  // namespace prometheus

namespace zeroshard {

// Thread-safe after Start. The destructor shuts down at once.
class GrpcServer {
 public:
  struct Options {
    std::string listen = {};                    // host:port, port 0 takes a free one
    std::vector<grpc::Service*> services = {};  // not owned; outlive the server
    // What a peer may send in one message. Larger ones are refused with RESOURCE_EXHAUSTED.
    int max_message_bytes = 16 << 20;
    // Channel arguments over and above those that every server has.
    std::vector<std::pair<std::string, int>> arguments = {};
    // Where calls are counted (grpc_metrics.h); null: they are not.
    std::shared_ptr<prometheus::Registry> registry = nullptr;
    // Null: the process's.
    std::shared_ptr<const security::Security> security = nullptr;
    // A connection older than this takes no new calls (its peer makes another, with the
    // certificates of then); calls under way have `connection_grace` to end. Infinite: for ever.
    absl::Duration connection_age = absl::InfiniteDuration();
    absl::Duration connection_grace = absl::InfiniteDuration();
    security::ConnectionGate::Most connections = {};
  };

  // UNAVAILABLE: the address is taken (SO_REUSEPORT is off, so it is never shared in silence).
  // INVALID_ARGUMENT: no address that this host can listen on, or one that other hosts reach and
  // nothing protects.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const Options& options);

  // The same in two parts, for who does something in between that should be left alone where the
  // address cannot be had. Whoever connects meanwhile waits; `listener` is closed if Start fails.
  static absl::StatusOr<std::unique_ptr<security::Listener>> Listen(const Options& options);
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(
      const Options& options, std::unique_ptr<security::Listener> listener);

  ~GrpcServer();
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  int port() const { return port_; }
  // host:port with the port that was bound.
  const std::string& address() const { return address_; }

  // What the health service answers. Serving from the start.
  void SetServing(bool serving);

  // Refuses new calls, waits up to `grace` for those under way, then cancels them.
  void Shutdown(absl::Duration grace);

 private:
  GrpcServer() = default;

  std::unique_ptr<security::Listener> listener_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
  std::string address_;
};

}  // namespace zeroshard
