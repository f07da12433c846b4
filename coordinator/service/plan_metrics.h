// What each rank of a job is planned to hold and to move, beside which dashboards draw what the
// workers measure (zeroshard_worker_memory_bytes and its like).
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "common/plan/planner.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard::coordinator {

// Thread-safe. A value is computed once, and made into series only when they are asked for: a job
// of a thousand ranks has twelve thousand.
class PlanMetrics : public prometheus::Collectable {
 public:
  // `spec` is normalised. Does nothing where the job has the series of as many ranks already.
  void Show(const std::string& job, const v1::JobSpec& spec, uint32_t ranks);
  void Remove(const std::string& job);

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  struct Plans {
    std::string stage;
    std::vector<RankPlan> ranks;
  };
  mutable std::mutex mutex_;
  std::map<std::string, Plans> jobs_;
};

}  // namespace zeroshard::coordinator
