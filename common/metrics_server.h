// Serves a program's metrics as text on http://host:port/metrics.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "prometheus/registry.h"

namespace prometheus {
class Collectable;
class Exposer;
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
  int port() const { return port_; }
  const std::string& address() const { return address_; }

 private:
  MetricsServer();

  std::shared_ptr<prometheus::Registry> registry_;
  const std::shared_ptr<ProcessMetrics> process_;
  std::unique_ptr<prometheus::Exposer> exposer_;
  int port_ = 0;
  std::string address_;
};

// A registry with zeroshard_build_info{component, version} in it.
std::shared_ptr<prometheus::Registry> MakeRegistry(const std::string& component);

}  // namespace zeroshard
