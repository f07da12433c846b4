// zeroshard-coordinator: assigns ranks, tracks barriers and steps, keeps jobs over restarts.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/files.h"
#include "common/grpc_server.h"
#include "common/health_server.h"
#include "common/log.h"
#include "common/metrics_server.h"
#include "common/option_checks.h"
#include "common/security/options.h"
#include "common/security/security_metrics.h"
#include "common/signals.h"
#include "common/version.h"
#include "coordinator/core/sqlite_log.h"
#include "coordinator/service/cluster_service.h"
#include "coordinator/service/jobs_service.h"
#include "coordinator/service/page/status_page.h"

namespace zeroshard::coordinator {
namespace {

struct Flags {
  std::string listen = "127.0.0.1:7070";
  std::string metrics_listen = "127.0.0.1:7071";
  std::string data_dir = "zeroshard-data";
  std::string health_listen;  // empty: none
  std::string port_file;
  double heartbeat_interval = 1.0;
  double member_timeout = 10.0;
  double replacement_grace = 30.0;
  double connection_age = 3600;
  security::SecurityOptions security;
};

absl::Status Serve(Flags flags, ShutdownSignal& shutdown) {
  auto loaded = security::Security::Load(flags.security, security::Role::kCoordinator);
  if (!loaded.ok()) return loaded.status();
  SetProcessSecurity(*loaded);
  GrpcServer::Options serving;
  serving.listen = flags.listen;
  serving.connection_age = absl::Seconds(flags.connection_age);
  // Sessions and watches are cut then; they come back by themselves within a heartbeat.
  serving.connection_grace =
      std::clamp(serving.connection_age / 2, absl::Seconds(1), absl::Seconds(30));
  // What cannot be listened on is found before the log is opened: opening it ends the term of
  // whoever wrote it last.
  auto listener = GrpcServer::Listen(serving);
  if (!listener.ok()) return listener.status();
  std::unique_ptr<HealthServer> health;
  if (!flags.health_listen.empty()) {
    auto started = HealthServer::Start(flags.health_listen);
    if (!started.ok()) return started.status();
    health = *std::move(started);
  }
  auto metrics = MetricsServer::Start(flags.metrics_listen, "coordinator");
  if (!metrics.ok()) return metrics.status();
  const auto security_metrics = std::make_shared<security::SecurityMetrics>(*loaded);
  (*metrics)->AddCollectable(security_metrics);
  if (absl::Status made = MakeFolders(flags.data_dir); !made.ok()) return made;
  // Clients elsewhere are told where history and logs are.
  std::error_code error;
  const auto absolute = std::filesystem::absolute(flags.data_dir, error);
  if (!error) flags.data_dir = absolute.lexically_normal().string();
  auto log = SqliteLog::Open(flags.data_dir + "/coordinator.db");
  if (!log.ok()) return log.status();

  std::mutex mutex;
  absl::Status fatal;
  Engine::Options options;
  options.core.heartbeat_interval = absl::Seconds(flags.heartbeat_interval);
  options.core.member_timeout = absl::Seconds(flags.member_timeout);
  options.core.replacement_grace = absl::Seconds(flags.replacement_grace);
  options.data_dir = flags.data_dir;
  options.clock = &SystemClock::Get();
  options.registry = (*metrics)->registry().get();
  options.on_fatal = [&](const absl::Status& status) {
    std::lock_guard<std::mutex> lock(mutex);
    fatal = status;
    shutdown.Trigger();
  };
  auto engine = Engine::Start(options, *std::move(log));
  if (!engine.ok()) return engine.status();
  (*metrics)->AddCollectable((*engine)->plan_metrics());
  ClusterService cluster(engine->get());
  JobsService jobs(engine->get());
  const StatusPage page(engine->get(), (*metrics)->http());
  serving.services = {&cluster, &jobs};
  serving.registry = (*metrics)->registry();
  auto server = GrpcServer::Start(serving, *std::move(listener));
  if (!server.ok()) return server.status();
  LogInfo("listening on ", (*server)->address(), ", status page on http://", (*metrics)->address(),
          "/, metrics on http://", (*metrics)->address(), "/metrics",
          health == nullptr ? "" : ", health checks at " + health->address(), ", data in ",
          flags.data_dir);
  if (!flags.port_file.empty()) {
    absl::Status written =
        WritePortFile(flags.port_file, {(*server)->address(), (*metrics)->address(), getpid()});
    if (!written.ok()) return written;
  }
  if (health != nullptr) health->SetReady(true);
  const int signal = shutdown.Wait();
  LogInfo("ending, ", signal > 0 ? "as a signal asked" : "after an error",
          "; jobs go on when a coordinator starts on the same data folder");
  if (health != nullptr) health->SetReady(false);
  (*server)->SetServing(false);
  (*engine)->Stop();
  (*server)->Shutdown(absl::Seconds(2));
  std::lock_guard<std::mutex> lock(mutex);
  return fatal;
}

}  // namespace
}  // namespace zeroshard::coordinator

int main(int argc, char** argv) {
  using namespace zeroshard;
  ShutdownSignal shutdown;
  SetLogComponent("coordinator");
  coordinator::Flags flags;
  CLI::App app(
      "Coordinator of a ZeroShard cluster: workers and stores register here, clients submit jobs "
      "here.\nEverything it must remember is in the data folder: after a crash, start it again on "
      "the same\nfolder, and jobs go on.");
  app.set_version_flag("--version", std::string("zeroshard-coordinator ") + kVersion);
  app.add_option("--listen", flags.listen, "gRPC address; port 0 takes a free one")
      ->capture_default_str();
  app.add_option("--metrics-listen", flags.metrics_listen,
                 "address of the status page http://.../ and of http://.../metrics; port 0 takes a "
                 "free one")
      ->capture_default_str();
  app.add_option("--health-listen", flags.health_listen, HealthServer::kOptionHelp)
      ->check([](const std::string& text) { return EmptyProblem(text, "host:port"); });
  app.add_option("--data-dir", flags.data_dir,
                 "folder of the log (coordinator.db) and of jobs/<name>/{history.jsonl,logs}; one "
                 "coordinator at a time")
      ->capture_default_str();
  app.add_option("--port-file", flags.port_file,
                 "write the bound addresses there as JSON once they are served");
  app.add_option("--heartbeat-interval", flags.heartbeat_interval,
                 "seconds between a member's heartbeats")
      ->check(CLI::Range(0.01, 60.0))
      ->capture_default_str();
  app.add_option("--member-timeout", flags.member_timeout,
                 "seconds of silence after which a member is lost")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  app.add_option("--replacement-grace", flags.replacement_grace,
                 "seconds that a job waits for resources.workers before it starts or goes on with "
                 "fewer, at least resources.min_workers")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  app.add_option("--max-connection-age", flags.connection_age,
                 "seconds after which a peer connects anew, with the certificates of then")
      ->check(CLI::Range(1.0, 30.0 * 86400))
      ->capture_default_str();
  security::AddSecurityOptions(&app, &flags.security, security::Role::kCoordinator);
  app.footer(
      "Exit codes: 0 ended as asked, 1 failed, 2 wrong usage, 3 address in use, 4 data folder in "
      "use.\nExample: zeroshard-coordinator --listen 0.0.0.0:7070 --metrics-listen 0.0.0.0:7071 "
      "--data-dir /var/lib/zeroshard --tls-cert tls.crt --tls-key tls.key --tls-ca ca.crt");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  if (flags.member_timeout < 2 * flags.heartbeat_interval) {
    LogError("--member-timeout ", flags.member_timeout, " is less than two heartbeat intervals (",
             flags.heartbeat_interval, "); one late heartbeat would lose a member");
    return kExitUsage;
  }
  const absl::Status status = coordinator::Serve(flags, shutdown);
  if (!status.ok()) LogError(status.message());
  return ExitCodeFor(status);
}
