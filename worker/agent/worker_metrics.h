// The worker's metrics (architecture, section 10), read from the job's own counters when they are
// asked for. A job's series appear with it, counters at 0, and vanish with it; what the device has
// is there all the time.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "prometheus/client_metric.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"
#include "worker/train/trainer.h"
#include "worker/zero/state_store.h"

namespace zeroshard {

// Thread-safe.
class WorkerMetrics : public prometheus::Collectable {
 public:
  // What this worker's device has; 0, as at first: unknown, and there is no such series.
  void SetDeviceMemory(uint64_t bytes) { device_memory_ = bytes; }
  // From here to End the series are there. `barrier_nanoseconds`, what the rank spent in the
  // coordinator's barriers, is added to the phase "barrier".
  void Begin(const std::string& job, uint32_t rank, uint32_t stage,
             const std::atomic<uint64_t>* barrier_nanoseconds);
  // Until these are known their series are 0. What is passed must stay until End has returned.
  void SetMemory(const MemoryAccounting* memory);
  // Of each communicator that the rank has.
  void SetTraffic(std::vector<const TrafficCounters*> traffic);
  // `bubble`: of the schedule; what is measured comes from the counters.
  void SetTrain(const TrainCounters* train, const BubbleShares& bubble = {});
  void SetOffload(const OffloadCounters* offload);
  // This rank has finished a step.
  void CountStep() { ++steps_; }
  void End();

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  void CollectJob(std::vector<prometheus::MetricFamily>* families) const;
  void CollectPipeline(std::vector<prometheus::MetricFamily>* families) const;

  std::atomic<uint64_t> device_memory_{0};
  std::atomic<uint64_t> steps_{0};
  mutable std::mutex mutex_;
  bool active_ = false;
  std::vector<prometheus::ClientMetric::Label> labels_;  // job, rank, stage
  const std::atomic<uint64_t>* barrier_nanoseconds_ = nullptr;
  const MemoryAccounting* memory_ = nullptr;
  std::vector<const TrafficCounters*> traffic_;
  const TrainCounters* train_ = nullptr;
  BubbleShares bubble_;
  const OffloadCounters* offload_ = nullptr;
};

}  // namespace zeroshard
