#include "common/security/security_metrics.h"

#include <utility>

#include "common/security/refusals.h"

namespace zeroshard::security {

namespace {

prometheus::MetricFamily Family(const char* name, const char* help, prometheus::MetricType type) {
  prometheus::MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = type;
  return family;
}

}  // namespace

std::vector<prometheus::MetricFamily> SecurityMetrics::Collect() const {
  std::vector<prometheus::MetricFamily> families;
  prometheus::MetricFamily refused =
      Family("zeroshard_rpc_refused_total",
             "Calls and connections that were refused: unknown callers, roles, floods, handshakes.",
             prometheus::MetricType::Counter);
  for (const Refusal refusal : kAllRefusals) {
    prometheus::ClientMetric metric;
    metric.label.push_back({"reason", NameOf(refusal)});
    metric.counter.value = static_cast<double>(Refused(refusal));
    refused.metric.push_back(std::move(metric));
  }
  families.push_back(std::move(refused));
  const CredentialFiles* const files = security_->files();
  if (files == nullptr) return families;

  prometheus::MetricFamily failures =
      Family("zeroshard_tls_certificate_reload_failures_total",
             "Times that changed TLS files were of no use: what was read before stays in use.",
             prometheus::MetricType::Counter);
  failures.metric.emplace_back().counter.value = static_cast<double>(files->refused());
  families.push_back(std::move(failures));
  if (files->expiry() == absl::InfiniteFuture()) return families;

  prometheus::MetricFamily expiry = Family(
      "zeroshard_tls_certificate_expiry_timestamp_seconds",
      "When the certificate in use ends, in seconds since 1970.", prometheus::MetricType::Gauge);
  expiry.metric.emplace_back().gauge.value =
      absl::ToDoubleSeconds(files->expiry() - absl::UnixEpoch());
  families.push_back(std::move(expiry));
  return families;
}

}  // namespace zeroshard::security
