// What the worker's and the store's main share: their options, their servers, their port file.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/App.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/grpc_server.h"
#include "common/health_server.h"
#include "common/member/member_session.h"
#include "common/metrics_server.h"
#include "common/security/security.h"
#include "common/signals.h"

namespace zeroshard {

struct MemberDaemonOptions {
  v1::MemberKind kind = v1::MEMBER_KIND_UNSPECIFIED;
  std::string program;  // "zeroshard-worker"
  std::string coordinator = "127.0.0.1:7070";
  std::string name;            // empty: worker-<host name> or store-<host name>
  std::string listen;          // empty: a free port of every address, or of 127.0.0.1 where
  std::string metrics_listen;  // other hosts are not spoken to
  std::string advertise_host;
  std::string port_file;
  std::string health_listen;           // empty: no port for health checks alone
  double connect_timeout_seconds = 0;  // 0: for ever
  security::SecurityOptions security;
  // Served beside health checks and reflection, with these limits and channel arguments. Not owned;
  // they outlive the daemon.
  std::vector<grpc::Service*> services;
  int max_message_bytes = 16 << 20;
  std::vector<std::pair<std::string, int>> arguments;
};

// --coordinator, --name, --listen, --metrics-listen, --health-listen, --advertise-host,
// --port-file, --connect-timeout and those of TLS, into `options`, which outlives `app`. Its `kind`
// is set.
void AddMemberOptions(CLI::App* app, MemberDaemonOptions* options);

// Parses, and where the program should end here (--help, a wrong option) returns its exit code.
int ParseOrExitCode(CLI::App* app, int argc, char** argv, bool* go_on);

// "zeroshard-worker: <message>" on stderr; returns the exit code for the status.
int ReportFailure(const std::string& program, const absl::Status& status);

// The servers of a member, from their start to their end.
class MemberDaemon {
 public:
  // Loads the process's security, listens for gRPC (health, reflection) and metrics, writes the
  // port file and a log line.
  static absl::StatusOr<std::unique_ptr<MemberDaemon>> Start(const MemberDaemonOptions& options);

  // Kind, name, host, addresses, process id, version, memory of the host; the caller adds what it
  // knows.
  v1::Hello MakeHello() const;
  MetricsServer& metrics() { return *metrics_; }
  // Where health checks alone are answered; empty: nowhere.
  std::string health_address() const { return health_ == nullptr ? "" : health_->address(); }
  // The host under which others reach this member.
  const std::string& host() const { return host_; }

  // Waits for `session` to be welcomed, then for a signal, and leaves. Returns the exit code.
  // `before_leaving` runs between the signal and the goodbye.
  int ServeUntilSignal(ShutdownSignal* signal, MemberSession* session,
                       const std::function<void(const std::string&)>& before_leaving);

 private:
  explicit MemberDaemon(const MemberDaemonOptions& options) : options_(options) {}

  // As ShutdownSignal::Wait; health checks follow the session meanwhile.
  int AwaitSignal(ShutdownSignal* signal, const MemberSession& session);

  MemberDaemonOptions options_;
  std::string host_;
  std::string metrics_host_;              // empty: no other host reaches it
  std::unique_ptr<HealthServer> health_;  // null: no port for it
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<MetricsServer> metrics_;
  std::shared_ptr<prometheus::Collectable> security_metrics_;
};

}  // namespace zeroshard
