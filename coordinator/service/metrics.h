// The coordinator's series (architecture, section 10).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/core/events.h"
#include "coordinator/service/plan_metrics.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"

namespace zeroshard::coordinator {

// A job's series appear when it is submitted and go when it ends, except a count that is not 0 of
// zeroshard_job_nonfinite_total, which stays for kLinger so that it is scraped. A value that is not
// finite is never exported: it would make every sum over jobs NaN. Not thread-safe.
class Metrics {
 public:
  explicit Metrics(prometheus::Registry* registry);

  void Apply(const JobAppears& appears);
  void Apply(const JobChanges& changes, absl::Duration now);
  void Apply(const Measure& measure);
  // `records` in order, at least one.
  void SetSteps(const std::string& job, const std::vector<v1::StepRecord>& records);
  // A job goes on from an earlier step.
  void SetCommitted(const std::string& job, uint64_t step);
  // By kind ("worker", "store") and state ("idle", "running", "lost").
  void SetMembers(const std::map<std::pair<std::string, std::string>, size_t>& counts);
  // By name, ranks that a barrier under way still waits for; of a job that is not there none.
  void SetBarriers(const std::map<std::string, size_t>& missing);
  void SetTerm(uint64_t term);
  // From a step's request until its decision was answered. Thread-safe.
  void ObserveCommit(absl::Duration took);
  // A history could not be written for want of files or room, and is tried again.
  void CountRetry() { retries_.Increment(); }
  // Takes away what has lingered.
  void Expire(absl::Duration now);

  // What ranks are planned to hold: from the job's first placement on.
  const std::shared_ptr<PlanMetrics>& plans() const { return plans_; }

  static constexpr absl::Duration kLinger = absl::Minutes(2);

 private:
  struct Series {
    v1::JobSpec spec;  // until it is placed; of one that may go on with fewer workers to its end
    uint32_t planned_ranks = 0;  // of the plans that are shown
    v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
    prometheus::Gauge* steps = nullptr;
    prometheus::Gauge* workers = nullptr;
    prometheus::Gauge* workers_wanted = nullptr;
    prometheus::Gauge* barrier_missing = nullptr;
    prometheus::Counter* generations = nullptr;
    prometheus::Gauge* loss = nullptr;       // from the first step on
    prometheus::Gauge* eval_loss = nullptr;  // from the first time it is measured on
    prometheus::Gauge* committed = nullptr;
    prometheus::Counter* steps_lost = nullptr;
    prometheus::Counter* nonfinite = nullptr;
    prometheus::Counter* saved = nullptr;
    prometheus::Counter* not_saved = nullptr;
    prometheus::Histogram* recovery = nullptr;
  };
  void CountStates();
  void End(const std::string& job, Series& series, absl::Duration now);
  void Remove(const Series& series);

  prometheus::Family<prometheus::Gauge>& states_;
  prometheus::Family<prometheus::Counter>& ended_;
  prometheus::Family<prometheus::Gauge>& steps_;
  prometheus::Family<prometheus::Gauge>& workers_;
  prometheus::Family<prometheus::Gauge>& workers_wanted_;
  prometheus::Family<prometheus::Gauge>& barrier_missing_;
  prometheus::Family<prometheus::Counter>& generations_;
  prometheus::Family<prometheus::Gauge>& loss_;
  prometheus::Family<prometheus::Gauge>& eval_loss_;
  prometheus::Family<prometheus::Gauge>& committed_;
  prometheus::Family<prometheus::Counter>& steps_lost_;
  prometheus::Family<prometheus::Counter>& nonfinite_;
  prometheus::Family<prometheus::Counter>& checkpoints_;
  prometheus::Family<prometheus::Histogram>& recovery_;
  prometheus::Family<prometheus::Gauge>& members_;
  prometheus::Gauge& term_;
  prometheus::Histogram& barrier_;
  prometheus::Histogram& commit_;
  prometheus::Counter& retries_;
  const std::shared_ptr<PlanMetrics> plans_ = std::make_shared<PlanMetrics>();
  std::map<std::string, Series> jobs_;
  std::map<std::string, std::pair<absl::Duration, prometheus::Counter*>> lingering_;
};

}  // namespace zeroshard::coordinator
