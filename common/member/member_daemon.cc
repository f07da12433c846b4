#include "common/member/member_daemon.h"

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <utility>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"
#include "common/exit_codes.h"
#include "common/files.h"
#include "common/log.h"
#include "common/member/host_info.h"
#include "common/net_address.h"
#include "common/option_checks.h"
#include "common/security/options.h"
#include "common/security/security_metrics.h"
#include "common/status_macros.h"
#include "common/version.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kGoodbye = absl::Seconds(2);
// How late a health check may be about the connection to the coordinator.
constexpr absl::Duration kReadyEvery = absl::Milliseconds(200);

// A coordinator that refuses says itself what to do.
absl::Status GaveUp(absl::Duration limit, const absl::Status& last,
                    const std::string& coordinator) {
  const std::string text =
      absl::StrCat("gave up after ", absl::FormatDuration(limit), ": ", last.message());
  if (absl::IsFailedPrecondition(last)) return absl::FailedPreconditionError(text);
  if (absl::IsUnauthenticated(last)) return absl::UnavailableError(text);  // it says what to do
  return absl::UnavailableError(absl::StrCat(text,
                                             ". Start one there (zeroshard-coordinator --listen ",
                                             coordinator, ") or correct --coordinator"));
}

security::Role RoleOf(v1::MemberKind kind) {
  return kind == v1::MEMBER_KIND_WORKER ? security::Role::kWorker : security::Role::kStore;
}

// A member's streams last as long as its job's generation and are not to be cut; each has a
// connection of its own, made with the certificates of its time.
constexpr absl::Duration kConnectionAge = absl::Hours(1);

}  // namespace

void AddMemberOptions(CLI::App* app, MemberDaemonOptions* options) {
  app->name(options->program);
  app->set_version_flag("--version", absl::StrCat(options->program, " ", kVersion));
  app->add_option("--coordinator", options->coordinator,
                  "Where the coordinator listens, host:port. It need not be there yet.")
      ->envname("ZEROSHARD_COORDINATOR")
      ->capture_default_str();
  app->add_option(
         "--name", options->name,
         "This member's name, unique in the cluster. Default: its kind and the host's name.")
      ->check([](const std::string& text) { return EmptyProblem(text, "a name"); })
      ->envname("ZEROSHARD_NAME");
  app->add_option("--listen", options->listen,
                  "Where to serve gRPC, host:port. Port 0 takes a free one. Default: 0.0.0.0:0 "
                  "with TLS or --insecure, else 127.0.0.1:0.");
  app->add_option("--metrics-listen", options->metrics_listen,
                  "Where to serve Prometheus metrics (path /metrics), host:port. On loopback it is "
                  "not advertised to other hosts. Default: as --listen.");
  app->add_option("--health-listen", options->health_listen, HealthServer::kOptionHelp)
      ->check([](const std::string& text) { return EmptyProblem(text, "host:port"); });
  app->add_option("--advertise-host", options->advertise_host,
                  "Name or address under which other hosts reach this one. Default: the host of "
                  "--listen, or this host's name where that is every address.")
      ->envname("ZEROSHARD_ADVERTISE_HOST");
  app->add_option("--port-file", options->port_file,
                  "Write {\"grpc\": ..., \"metrics\": ..., \"pid\": ...} here once both ports are "
                  "open.");
  app->add_option(
         "--connect-timeout", options->connect_timeout_seconds,
         "Give up when no coordinator has accepted this member within so many seconds of "
         "the start: with exit code 3 where none answers, 4 where one refuses it (its name "
         "is taken). 0: keep trying for ever.")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  security::AddSecurityOptions(app, &options->security, RoleOf(options->kind));
}

int ParseOrExitCode(CLI::App* app, int argc, char** argv, bool* go_on) {
  *go_on = false;
  try {
    app->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {
      app->exit(error);  // --help, --version
      return kExitOk;
    }
    return ReportFailure(app->get_name(), absl::InvalidArgumentError(absl::StrCat(
                                              error.what(), "; see ", app->get_name(), " --help")));
  }
  *go_on = true;
  return kExitOk;
}

int ReportFailure(const std::string& program, const absl::Status& status) {
  const std::string message(status.message());
  std::fprintf(stderr, "%s: %s\n", program.c_str(), message.c_str());
  return ExitCodeFor(status);
}

absl::StatusOr<std::unique_ptr<MemberDaemon>> MemberDaemon::Start(
    const MemberDaemonOptions& options) {
  if (absl::StatusOr<HostPort> parsed = ParseHostPort(options.coordinator);
      !parsed.ok() || parsed->port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--coordinator: ", parsed.ok() ? "port 0 cannot be connected to"
                                                    : std::string(parsed.status().message())));
  }
  ZS_ASSIGN_OR_RETURN(const auto security,
                      security::Security::Load(options.security, RoleOf(options.kind)));
  ZS_RETURN_IF_ERROR(security->CheckTarget(options.coordinator, "--coordinator"));
  std::unique_ptr<MemberDaemon> daemon(new MemberDaemon(options));
  for (std::string* address : {&daemon->options_.listen, &daemon->options_.metrics_listen}) {
    if (address->empty()) *address = security->open() ? "0.0.0.0:0" : "127.0.0.1:0";
  }
  absl::StatusOr<HostPort> listen = ParseHostPort(daemon->options_.listen);
  if (!listen.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--listen: ", listen.status().message()));
  }
  absl::StatusOr<HostPort> metrics_listen = ParseHostPort(daemon->options_.metrics_listen);
  if (!metrics_listen.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--metrics-listen: ", metrics_listen.status().message()));
  }
  SetProcessSecurity(security);
  const bool worker = options.kind == v1::MEMBER_KIND_WORKER;
  std::string& name = daemon->options_.name;
  if (name.empty()) name = absl::StrCat(worker ? "worker-" : "store-", HostName());
  daemon->host_ = AdvertisedHost(options.advertise_host, listen->host);
  daemon->metrics_host_ = AdvertisedHost(options.advertise_host, metrics_listen->host);
  if (security::IsLoopback(metrics_listen->host) && !security::IsLoopback(daemon->host_)) {
    daemon->metrics_host_.clear();
  }
  SetLogComponent(name);

  if (!options.health_listen.empty()) {
    auto health = HealthServer::Start(options.health_listen);
    if (!health.ok()) return health.status();
    daemon->health_ = *std::move(health);
  }
  auto metrics = MetricsServer::Start(daemon->options_.metrics_listen, worker ? "worker" : "store");
  if (!metrics.ok()) return metrics.status();
  daemon->metrics_ = *std::move(metrics);
  daemon->security_metrics_ = std::make_shared<security::SecurityMetrics>(security);
  daemon->metrics_->AddCollectable(daemon->security_metrics_);
  GrpcServer::Options server;
  server.registry = daemon->metrics_->registry();
  server.listen = daemon->options_.listen;
  server.services = options.services;
  server.connection_age = kConnectionAge;
  server.max_message_bytes = options.max_message_bytes;
  server.arguments = options.arguments;
  auto started = GrpcServer::Start(server);
  if (!started.ok()) return started.status();
  daemon->server_ = *std::move(started);
  if (!options.port_file.empty()) {
    absl::Status written = WritePortFile(
        options.port_file,
        {daemon->server_->address(), daemon->metrics_->address(), static_cast<long>(getpid())});
    if (!written.ok()) return written;
  }
  LogInfo(options.program, " ", kVersion, " listens on ", daemon->server_->address(),
          ", metrics at http://", daemon->metrics_->address(), "/metrics",
          daemon->health_ == nullptr ? "" : ", health checks at " + daemon->health_->address(),
          ", coordinator ", options.coordinator);
  return daemon;
}

v1::Hello MemberDaemon::MakeHello() const {
  v1::Hello hello;
  hello.set_kind(options_.kind);
  hello.set_name(options_.name);
  hello.set_host(host_);
  hello.set_address(HostPort{host_, server_->port()}.ToString());
  if (!metrics_host_.empty()) {
    hello.set_metrics_address(HostPort{metrics_host_, metrics_->port()}.ToString());
  }
  hello.set_pid(getpid());
  hello.set_version(kVersion);
  hello.set_memory_bytes(MemoryLimitBytes());
  return hello;
}

int MemberDaemon::AwaitSignal(ShutdownSignal* signal, const MemberSession& session) {
  if (health_ == nullptr) return signal->Wait();
  int got = 0;
  while (got == 0) {
    health_->SetReady(session.connected());
    got = signal->Wait(kReadyEvery);
  }
  return got;
}

int MemberDaemon::ServeUntilSignal(ShutdownSignal* signal, MemberSession* session,
                                   const std::function<void(const std::string&)>& before_leaving) {
  const absl::Duration limit = absl::Seconds(options_.connect_timeout_seconds);
  const auto start = std::chrono::steady_clock::now();
  int code = kExitOk;
  int got = 0;
  // In slices, so that a signal ends the wait for a coordinator too.
  bool waiting = limit > absl::ZeroDuration();
  while (waiting && got == 0) {
    const absl::Status welcomed = session->WaitWelcome(absl::ZeroDuration());
    if (welcomed.ok()) break;
    if (absl::FromChrono(std::chrono::steady_clock::now() - start) >= limit) {
      code = ReportFailure(options_.program, GaveUp(limit, welcomed, options_.coordinator));
      break;
    }
    got = signal->Wait(absl::Milliseconds(100));
  }
  if (code != kExitOk) return code;
  if (got == 0) got = AwaitSignal(signal, *session);
  const std::string reason = got == SIGINT    ? "interrupted (SIGINT)"
                             : got == SIGTERM ? "told to leave (SIGTERM)"
                                              : "shut down";
  LogInfo("leaving: ", reason);
  server_->SetServing(false);
  if (health_ != nullptr) health_->SetReady(false);
  before_leaving(reason);
  session->Leave(reason, kGoodbye);
  return code;
}

}  // namespace zeroshard
