#include "common/metrics_server.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/net_address.h"
#include "common/process_metrics.h"
#include "common/version.h"
#include "prometheus/exposer.h"
#include "prometheus/gauge.h"

namespace zeroshard {

std::shared_ptr<prometheus::Registry> MakeRegistry(const std::string& component) {
  auto registry = std::make_shared<prometheus::Registry>();
  prometheus::BuildGauge()
      .Name("zeroshard_build_info")
      .Help("Always 1; the labels say which program of which version this is.")
      .Register(*registry)
      .Add({{"component", component}, {"version", kVersion}})
      .Set(1);
  return registry;
}

MetricsServer::MetricsServer() : process_(std::make_shared<ProcessMetrics>()) {}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& listen,
                                                                    const std::string& component) {
  absl::StatusOr<HostPort> address = ParseHostPort(listen);
  if (!address.ok()) return address.status();
  if (absl::Status probed = ProbeListen(*address, "metrics"); !probed.ok()) return probed;
  std::unique_ptr<MetricsServer> result(new MetricsServer);
  result->registry_ = MakeRegistry(component);
  std::vector<int> ports;
  try {
    result->exposer_ = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", address->ToString(), "num_threads", "2", "request_timeout_ms", "10000"});
    ports = result->exposer_->GetListeningPorts();
    result->exposer_->RegisterCollectable(result->registry_);
    result->exposer_->RegisterCollectable(result->process_);
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address->ToString(),
                                               " for metrics: ", error.what(),
                                               "; choose another port (port 0 takes a free one)"));
  }
  if (ports.empty()) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address->ToString(), " for metrics: no port was bound"));
  }
  result->port_ = ports.front();
  address->port = result->port_;
  result->address_ = address->ToString();
  return result;
}

// The exposer's listening thread looks every two seconds whether it should end, or when somebody
// connects.
MetricsServer::~MetricsServer() {
  std::atomic<bool> ended = false;
  std::thread waker;
  try {
    waker = std::thread([&] {
      const auto address = ParseHostPort(address_);
      while (address.ok() && !ended) {
        Knock(*address);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    });
  } catch (const std::system_error&) {
    // No thread: it takes the two seconds.
  }
  exposer_.reset();
  ended = true;
  if (waker.joinable()) waker.join();
}

void MetricsServer::AddCollectable(const std::shared_ptr<prometheus::Collectable>& collectable) {
  exposer_->RegisterCollectable(collectable);
}

}  // namespace zeroshard
