// zeroshard_tls_certificate_expiry_timestamp_seconds and zeroshard_rpc_refused_total.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "common/security/security.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace zeroshard::security {

// Read when they are asked for: a certificate that was renewed shows its new end. Thread-safe.
class SecurityMetrics : public prometheus::Collectable {
 public:
  explicit SecurityMetrics(std::shared_ptr<const Security> security)
      : security_(std::move(security)) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::shared_ptr<const Security> security_;
  mutable std::mutex mutex_;
  mutable double expiry_ = 0;  // the last one that could be read
};

}  // namespace zeroshard::security
