#include "coordinator/service/metrics.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace zeroshard::coordinator {
namespace {

const prometheus::Histogram::BucketBoundaries kRecoveryBuckets = {0.5, 1,  2,   5,   10,
                                                                  20,  60, 120, 300, 600};
const prometheus::Histogram::BucketBoundaries kBarrierBuckets = {0.001, 0.01, 0.1, 0.5, 1,
                                                                 5,     10,   30,  60,  120};

// A decision waits for the gradients that are still on their way: of a large job for many seconds.
const prometheus::Histogram::BucketBoundaries kCommitBuckets = {
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60};

template <typename Builder>
auto& Register(Builder builder, const char* name, const char* help,
               prometheus::Registry* registry) {
  return builder.Name(name).Help(help).Register(*registry);
}

constexpr std::pair<v1::JobState, const char*> kLive[] = {{v1::JOB_STATE_QUEUED, "queued"},
                                                          {v1::JOB_STATE_PLACING, "placing"},
                                                          {v1::JOB_STATE_RUNNING, "running"},
                                                          {v1::JOB_STATE_RECOVERING, "recovering"}};
constexpr std::pair<v1::JobState, const char*> kEnded[] = {{v1::JOB_STATE_COMPLETED, "completed"},
                                                           {v1::JOB_STATE_FAILED, "failed"},
                                                           {v1::JOB_STATE_CANCELLED, "cancelled"}};

}  // namespace

Metrics::Metrics(prometheus::Registry* registry)
    : states_(Register(prometheus::BuildGauge(), "zeroshard_jobs",
                       "Jobs that have not ended, by state.", registry)),
      ended_(Register(prometheus::BuildCounter(), "zeroshard_jobs_ended_total",
                      "Jobs that ended since this coordinator started, by how.", registry)),
      steps_(Register(prometheus::BuildGauge(), "zeroshard_job_steps",
                      "Steps that a job that has not ended is to make.", registry)),
      workers_(Register(prometheus::BuildGauge(), "zeroshard_job_workers",
                        "Ranks of a job's open generation; 0 while none is.", registry)),
      workers_wanted_(Register(prometheus::BuildGauge(), "zeroshard_job_workers_wanted",
                               "Workers that a job asks for.", registry)),
      barrier_missing_(Register(
          prometheus::BuildGauge(), "zeroshard_coordinator_barrier_missing",
          "Ranks that a barrier of the job still waits for; 0 while none is under way.", registry)),
      generations_(Register(prometheus::BuildCounter(), "zeroshard_job_generations_total",
                            "Generations opened for a job that has not ended.", registry)),
      loss_(Register(prometheus::BuildGauge(), "zeroshard_job_loss",
                     "Mean loss of the last committed step of a job that has not ended.",
                     registry)),
      eval_loss_(Register(prometheus::BuildGauge(), "zeroshard_job_eval_loss",
                          "Mean loss of the validation set when it was measured last, of a job "
                          "that has not ended.",
                          registry)),
      committed_(Register(prometheus::BuildGauge(), "zeroshard_job_committed_step",
                          "Last committed step of a job that has not ended.", registry)),
      steps_lost_(Register(prometheus::BuildCounter(), "zeroshard_job_steps_lost_total",
                           "Committed steps that a job had to do again.", registry)),
      nonfinite_(Register(
          prometheus::BuildCounter(), "zeroshard_job_nonfinite_total",
          "Steps that failed, or that fp16 skipped, because a loss or gradient was not finite.",
          registry)),
      checkpoints_(Register(prometheus::BuildCounter(), "zeroshard_job_checkpoints_total",
                            "Checkpoints of a job that has not ended, by result: complete or "
                            "abandoned.",
                            registry)),
      recovery_(Register(prometheus::BuildHistogram(), "zeroshard_job_recovery_seconds",
                         "From the loss of a member until the job goes on.", registry)),
      members_(Register(prometheus::BuildGauge(), "zeroshard_coordinator_members",
                        "Members by kind and state.", registry)),
      term_(Register(prometheus::BuildGauge(), "zeroshard_coordinator_term",
                     "The coordinator's term; it grows with every start.", registry)
                .Add({})),
      barrier_(Register(prometheus::BuildHistogram(), "zeroshard_coordinator_barrier_seconds",
                        "From the first arrival at a barrier until the last.", registry)
                   .Add({}, kBarrierBuckets)),
      commit_(Register(prometheus::BuildHistogram(), "zeroshard_coordinator_step_commit_seconds",
                       "From an offloaded job's request to commit a step until its decision is "
                       "durable and answered.",
                       registry)
                  .Add({}, kCommitBuckets)),
      retries_(Register(prometheus::BuildCounter(), "zeroshard_coordinator_write_retries_total",
                        "Times that a job's history was tried again for want of files or room; "
                        "everybody waits meanwhile.",
                        registry)
                   .Add({})) {
  SetMembers({});
  CountStates();
  for (const auto& [state, name] : kEnded) ended_.Add({{"state", name}});
}

void Metrics::Apply(const JobAppears& appears) {
  if (const auto old = lingering_.find(appears.job); old != lingering_.end()) {
    nonfinite_.Remove(old->second.second);
    lingering_.erase(old);
  }
  if (jobs_.contains(appears.job)) return;
  const prometheus::Labels labels = {{"job", appears.job}};
  Series& series = jobs_[appears.job];
  series.spec = appears.spec;
  series.steps = &steps_.Add(labels);
  series.steps->Set(static_cast<double>(appears.spec.steps()));
  series.workers = &workers_.Add(labels);
  series.workers_wanted = &workers_wanted_.Add(labels);
  series.workers_wanted->Set(appears.spec.resources().workers());
  series.barrier_missing = &barrier_missing_.Add(labels);
  series.generations = &generations_.Add(labels);
  series.committed = &committed_.Add(labels);
  series.steps_lost = &steps_lost_.Add(labels);
  series.nonfinite = &nonfinite_.Add(labels);
  series.saved = &checkpoints_.Add({{"job", appears.job}, {"result", "complete"}});
  series.not_saved = &checkpoints_.Add({{"job", appears.job}, {"result", "abandoned"}});
  series.recovery = &recovery_.Add(labels, kRecoveryBuckets);
}

void Metrics::Apply(const JobChanges& changes, absl::Duration now) {
  const auto found = jobs_.find(changes.job);
  if (found == jobs_.end()) return;
  Series& series = found->second;
  for (const auto& [state, name] : kEnded) {
    if (changes.state != state) continue;
    ended_.Add({{"state", name}}).Increment();
    End(changes.job, series, now);
    jobs_.erase(found);
    CountStates();
    return;
  }
  series.workers->Set(changes.ranks);
  // A queue may be long, and its plans are of no ranks yet.
  const v1::ResourceSpec& resources = series.spec.resources();
  const uint32_t ranks = changes.ranks != 0          ? changes.ranks
                         : series.planned_ranks != 0 ? series.planned_ranks
                                                     : resources.workers();
  if (changes.state != v1::JOB_STATE_QUEUED && ranks != series.planned_ranks) {
    plans_->Show(changes.job, series.spec, ranks);
    series.planned_ranks = ranks;
    const bool keeps_its_size =
        resources.min_workers() == 0 || resources.min_workers() == resources.workers();
    if (keeps_its_size) series.spec.Clear();
  }
  if (std::exchange(series.state, changes.state) == changes.state) return;
  CountStates();
}

void Metrics::CountStates() {
  for (const auto& [state, name] : kLive) {
    const auto count = std::count_if(jobs_.begin(), jobs_.end(), [state = state](const auto& job) {
      return job.second.state == state;
    });
    states_.Add({{"state", name}}).Set(static_cast<double>(count));
  }
}

void Metrics::Apply(const Measure& measure) {
  if (measure.kind == MetricKind::kBarrierSeconds) {
    barrier_.Observe(measure.value);
    return;
  }
  const auto found = jobs_.find(measure.job);
  if (found == jobs_.end()) return;
  Series& series = found->second;
  switch (measure.kind) {
    case MetricKind::kNonFinite:
      series.nonfinite->Increment();
      break;
    case MetricKind::kSaved:
      series.saved->Increment();
      break;
    case MetricKind::kNotSaved:
      series.not_saved->Increment();
      break;
    case MetricKind::kStepsLost:
      series.steps_lost->Increment(measure.value);
      break;
    case MetricKind::kRecoverySeconds:
      series.recovery->Observe(measure.value);
      break;
    case MetricKind::kGeneration:
      series.generations->Increment();
      break;
    case MetricKind::kBarrierSeconds:  // above
      break;
  }
}

void Metrics::End(const std::string& job, Series& series, absl::Duration now) {
  if (series.nonfinite->Value() > 0) {
    lingering_[job] = {now + kLinger, std::exchange(series.nonfinite, nullptr)};
  }
  Remove(series);
  plans_->Remove(job);
}

void Metrics::Remove(const Series& series) {
  if (series.loss != nullptr) loss_.Remove(series.loss);
  if (series.eval_loss != nullptr) eval_loss_.Remove(series.eval_loss);
  if (series.nonfinite != nullptr) nonfinite_.Remove(series.nonfinite);
  steps_.Remove(series.steps);
  workers_.Remove(series.workers);
  workers_wanted_.Remove(series.workers_wanted);
  barrier_missing_.Remove(series.barrier_missing);
  generations_.Remove(series.generations);
  committed_.Remove(series.committed);
  steps_lost_.Remove(series.steps_lost);
  checkpoints_.Remove(series.saved);
  checkpoints_.Remove(series.not_saved);
  recovery_.Remove(series.recovery);
}

void Metrics::SetSteps(const std::string& job, const std::vector<v1::StepRecord>& records) {
  const auto found = jobs_.find(job);
  if (found == jobs_.end()) return;
  Series& series = found->second;
  if (std::isfinite(records.back().loss())) {  // a skipped step's need not be
    if (series.loss == nullptr) series.loss = &loss_.Add({{"job", job}});
    series.loss->Set(records.back().loss());
  }
  series.committed->Set(static_cast<double>(records.back().step()));
  for (const v1::StepRecord& record : records) {
    if (!record.has_eval_loss() || !std::isfinite(record.eval_loss())) continue;
    if (series.eval_loss == nullptr) series.eval_loss = &eval_loss_.Add({{"job", job}});
    series.eval_loss->Set(record.eval_loss());
  }
}

void Metrics::SetCommitted(const std::string& job, uint64_t step) {
  const auto found = jobs_.find(job);
  if (found != jobs_.end()) found->second.committed->Set(static_cast<double>(step));
}

void Metrics::SetMembers(const std::map<std::pair<std::string, std::string>, size_t>& counts) {
  for (const char* kind : {"worker", "store"}) {
    for (const char* state : {"idle", "running", "lost"}) {
      const auto found = counts.find({kind, state});
      members_.Add({{"kind", kind}, {"state", state}})
          .Set(found == counts.end() ? 0 : static_cast<double>(found->second));
    }
  }
}

void Metrics::SetBarriers(const std::map<std::string, size_t>& missing) {
  for (auto& [job, series] : jobs_) {
    const auto found = missing.find(job);
    series.barrier_missing->Set(found == missing.end() ? 0 : static_cast<double>(found->second));
  }
}

void Metrics::ObserveCommit(absl::Duration took) { commit_.Observe(absl::ToDoubleSeconds(took)); }

void Metrics::SetTerm(uint64_t term) { term_.Set(static_cast<double>(term)); }

void Metrics::Expire(absl::Duration now) {
  for (auto it = lingering_.begin(); it != lingering_.end();) {
    if (now >= it->second.first) {
      nonfinite_.Remove(it->second.second);
      it = lingering_.erase(it);
    } else {
      ++it;
    }
  }
}

}  // namespace zeroshard::coordinator
