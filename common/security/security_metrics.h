// zeroshard_rpc_refused_total, and with TLS zeroshard_tls_certificate_expiry_timestamp_seconds and
// zeroshard_tls_certificate_reload_failures_total.
#pragma once

#include <memory>
#include <vector>

#include "common/security/security.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace zeroshard::security {

// Of the certificate in use, which is not always the one in the file. Thread-safe.
class SecurityMetrics : public prometheus::Collectable {
 public:
  explicit SecurityMetrics(std::shared_ptr<const Security> security)
      : security_(std::move(security)) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::shared_ptr<const Security> security_;
};

}  // namespace zeroshard::security
