#include "common/security/security_metrics.h"

#include <utility>

#include "common/security/certificate.h"
#include "common/security/refusals.h"

namespace zeroshard::security {

std::vector<prometheus::MetricFamily> SecurityMetrics::Collect() const {
  std::vector<prometheus::MetricFamily> families;
  prometheus::MetricFamily refused;
  refused.name = "zeroshard_rpc_refused_total";
  refused.help = "Calls and connections that were refused: unknown callers, roles, floods.";
  refused.type = prometheus::MetricType::Counter;
  for (const Refusal refusal : kAllRefusals) {
    prometheus::ClientMetric metric;
    metric.label.push_back({"reason", NameOf(refusal)});
    metric.counter.value = static_cast<double>(Refused(refusal));
    refused.metric.push_back(std::move(metric));
  }
  families.push_back(std::move(refused));
  if (security_->cert_path().empty()) return families;

  const absl::StatusOr<Certificate> certificate = ReadCertificate(security_->cert_path());
  prometheus::MetricFamily expiry;
  expiry.name = "zeroshard_tls_certificate_expiry_timestamp_seconds";
  expiry.help = "When this process's certificate ends, in seconds since 1970.";
  expiry.type = prometheus::MetricType::Gauge;
  prometheus::ClientMetric metric;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (certificate.ok())
      expiry_ = absl::ToDoubleSeconds(certificate->not_after - absl::UnixEpoch());
    metric.gauge.value = expiry_;
  }
  expiry.metric.push_back(std::move(metric));
  families.push_back(std::move(expiry));
  return families;
}

}  // namespace zeroshard::security
