#include "common/metrics_server.h"

#include <utility>

#include "common/process_metrics.h"
#include "common/version.h"
#include "prometheus/gauge.h"
#include "prometheus/text_serializer.h"

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
  std::unique_ptr<MetricsServer> result(new MetricsServer);
  result->registry_ = MakeRegistry(component);
  result->AddCollectable(result->registry_);
  result->AddCollectable(result->process_);
  HttpServer::Options options;
  options.listen = listen;
  options.what = "metrics";
  auto http = HttpServer::Start(options);
  if (!http.ok()) return http.status();
  result->http_ = *std::move(http);
  result->http_->Handle(
      "/metrics", [server = result.get()](const HttpRequest& request, const HttpAnswer& answer) {
        if (request.path != "/metrics" && request.path != "/metrics/") {
          answer(HttpError(404, "there is nothing here; /metrics is"));
          return;
        }
        HttpResponse response;
        response.content_type = "text/plain; version=0.0.4; charset=utf-8";
        response.body = server->Collect();
        answer(std::move(response));
      });
  return result;
}

MetricsServer::~MetricsServer() { http_.reset(); }

void MetricsServer::AddCollectable(const std::shared_ptr<prometheus::Collectable>& collectable) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(collectables_, [](const auto& weak) { return weak.expired(); });
  collectables_.push_back(collectable);
}

std::string MetricsServer::Collect() {
  std::vector<std::shared_ptr<prometheus::Collectable>> sources;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& weak : collectables_) {
      if (auto source = weak.lock()) sources.push_back(std::move(source));
    }
  }
  std::vector<prometheus::MetricFamily> families;
  for (const auto& source : sources) {
    for (prometheus::MetricFamily& family : source->Collect()) {
      families.push_back(std::move(family));
    }
  }
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace zeroshard
