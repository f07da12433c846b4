// Serves a program's metrics as text on http://host:port/metrics.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/http_server.h"
#include "prometheus/registry.h"

namespace prometheus {
class Collectable;
}  // namespace prometheus

namespace zeroshard {

class ProcessMetrics;

// Thread-safe after Start. Collects from `registry()`, to which the program adds its families, and
// holds zeroshard_build_info and process_metrics.h's series from the start. The registry may
// outlive the server.
class MetricsServer {
 public:
  // `listen` is host:port, port 0 takes a free one; `component` labels zeroshard_build_info.
  // UNAVAILABLE: the address is taken. INVALID_ARGUMENT: no address of this host.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& listen,
                                                              const std::string& component);
  ~MetricsServer();

  const std::shared_ptr<prometheus::Registry>& registry() const { return registry_; }
  // For values that are read when they are asked for. Not kept alive: when it is gone, so are its
  // series.
  void AddCollectable(const std::shared_ptr<prometheus::Collectable>& collectable);
  int port() const { return http_->port(); }
  const std::string& address() const { return http_->address(); }
  // For what else is shown on this port. Lives as long as this.
  HttpServer* http() const { return http_.get(); }

 private:
  MetricsServer();
  std::string Collect();

  std::shared_ptr<prometheus::Registry> registry_;
  const std::shared_ptr<ProcessMetrics> process_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<prometheus::Collectable>> collectables_;
  std::unique_ptr<HttpServer> http_;  // last: its handler uses the rest
};

// A registry with zeroshard_build_info{component, version} in it.
std::shared_ptr<prometheus::Registry> MakeRegistry(const std::string& component);

}  // namespace zeroshard
