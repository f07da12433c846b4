#include "coordinator/core/durable_log.h"

namespace zeroshard::coordinator {
namespace {

struct Applier {
  LoadedState* state;

  LoadedJob* Find(const std::string& run_id) const {
    const auto found = state->jobs.find(run_id);
    return found == state->jobs.end() ? nullptr : &found->second;
  }

  void operator()(const CounterRecord& record) const {
    state->counters[record.name] = record.value;
  }
  void operator()(const ClusterRecord& record) const { state->cluster_id = record.cluster_id; }
  void operator()(const JobRecord& record) const { state->jobs[record.run_id].job = record; }
  void operator()(const RankRecord& record) const {
    if (LoadedJob* job = Find(record.run_id)) job->ranks[record.rank] = record;
  }
  void operator()(const EventRecord& record) const {
    LoadedJob* job = Find(record.run_id);
    if (job == nullptr) return;
    job->events[record.index] = record.event;
    while (job->events.size() > kMaxEvents) job->events.erase(job->events.begin());
  }
  void operator()(const EventForgottenRecord& record) const {
    if (LoadedJob* job = Find(record.run_id)) job->events.erase(record.index);
  }
  void operator()(const FenceRecord& record) const { state->fences[record.incarnation] = record; }
  void operator()(const KeyRecord& record) const {
    if (LoadedJob* job = Find(record.run_id)) job->keys[record.key] = record.value;
  }
  void operator()(const BarrierRecord& record) const {
    if (LoadedJob* job = Find(record.run_id)) job->barriers.push_back(record.name);
  }
  void operator()(const GenerationClosedRecord& record) const {
    LoadedJob* job = Find(record.run_id);
    if (job == nullptr) return;
    job->keys.clear();
    job->barriers.clear();
    if (record.forget_ranks) job->ranks.clear();
  }
  void operator()(const StoreMapRecord& record) const {
    if (LoadedJob* job = Find(record.run_id)) job->stores = record;
  }
  void operator()(const StepDecisionRecord& record) const {
    if (LoadedJob* job = Find(record.run_id)) job->decision = record;
  }
  void operator()(const JobForgottenRecord& record) const { state->jobs.erase(record.run_id); }
};

}  // namespace

void Apply(const LogRecord& record, LoadedState* state) { std::visit(Applier{state}, record); }

}  // namespace zeroshard::coordinator
