// The store's metrics (architecture, section 10), read when they are asked for.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/histogram.h"
#include "prometheus/metric_family.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::store {

// How a store is now.
struct StoreReadings {
  v1::StoreUsage usage;  // of all jobs
  // Bytes of payload so far: from and to workers, to other stores.
  uint64_t pushed = 0, pulled = 0, copied = 0;
  uint64_t memory_limit = 0, memory_used = 0;
  uint64_t buffer_bytes = 0;  // of states on the disk
  uint64_t nvme_limit = 0;
  uint64_t jobs = 0;
  uint64_t disk_read = 0, disk_written = 0, disk_errors = 0;  // so far
  std::vector<double> update_seconds;    // of each update since the last reading
  std::vector<double> snapshot_seconds;  // likewise
};

// Thread-safe. All series are there from the start.
class StoreMetrics : public prometheus::Collectable {
 public:
  // `read` is called by each collection, one at a time, and outlives the object.
  explicit StoreMetrics(std::function<StoreReadings()> read);
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::function<StoreReadings()> read_;
  mutable std::mutex mutex_;
  mutable prometheus::Histogram updates_, snapshots_;
};

}  // namespace zeroshard::store
