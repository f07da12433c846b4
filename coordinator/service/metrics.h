// The coordinator's series (architecture, section 10).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "coordinator/core/events.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"

namespace zeroshard::coordinator {

// A job's series appear when it is submitted and go when it ends, except a count that is not 0 of
// zeroshard_job_nonfinite_total, which stays for kLinger so that it is scraped. Not thread-safe.
class Metrics {
 public:
  explicit Metrics(prometheus::Registry* registry);

  void Apply(const Measure& measure, absl::Duration now);
  // `records` in order, at least one.
  void SetSteps(const std::string& job, const std::vector<v1::StepRecord>& records);
  // A job goes on from an earlier step.
  void SetCommitted(const std::string& job, uint64_t step);
  // By kind ("worker", "store") and state ("idle", "running", "lost").
  void SetMembers(const std::map<std::pair<std::string, std::string>, size_t>& counts);
  void SetTerm(uint64_t term);
  // From a step's request until its decision was answered. Thread-safe.
  void ObserveCommit(absl::Duration took);
  // Takes away what has lingered.
  void Expire(absl::Duration now);

  static constexpr absl::Duration kLinger = absl::Minutes(2);

 private:
  struct Series {
    prometheus::Gauge* loss = nullptr;       // from the first step on
    prometheus::Gauge* eval_loss = nullptr;  // from the first time it is measured on
    prometheus::Gauge* committed = nullptr;
    prometheus::Counter* steps_lost = nullptr;
    prometheus::Counter* nonfinite = nullptr;
    prometheus::Counter* saved = nullptr;
    prometheus::Counter* not_saved = nullptr;
    prometheus::Histogram* recovery = nullptr;
  };
  void Remove(const std::string& job, Series& series);

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
  std::map<std::string, Series> jobs_;
  std::map<std::string, std::pair<absl::Duration, prometheus::Counter*>> lingering_;
};

}  // namespace zeroshard::coordinator
