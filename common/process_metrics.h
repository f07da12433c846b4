// What Linux says of this process, under the names that every Prometheus client library gives it:
// process_cpu_seconds_total, process_open_fds, process_max_fds, process_virtual_memory_bytes,
// process_resident_memory_bytes, process_start_time_seconds.
#pragma once

#include <string>
#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace zeroshard {

// Thread-safe. Read at each collection; what cannot be read then is left out.
class ProcessMetrics : public prometheus::Collectable {
 public:
  // `root`: the mount of procfs; others: tests alone.
  explicit ProcessMetrics(std::string root = "/proc") : root_(std::move(root)) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::string root_;
};

}  // namespace zeroshard
