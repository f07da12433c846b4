// What clients are shown. Reads only.
#include "absl/strings/str_cat.h"
#include "common/plan/planner.h"
#include "coordinator/core/core.h"
#include "coordinator/core/placement.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {

v1::JobStatus Core::Brief(const Run& run) const {
  v1::JobStatus status;
  status.set_name(run.job.spec.name());
  status.set_run_id(run.job.run_id);
  status.set_state(run.job.state);
  status.set_reason(run.job.reason);
  status.set_generation(run.job.generation);
  status.set_committed_step(run.job.committed_step);
  status.set_steps(run.job.spec.steps());
  if (run.last.step() != 0) *status.mutable_last() = run.last;
  if (run.first.step() != 0) *status.mutable_first() = run.first;
  status.set_submitted_unix_ms(run.job.submitted_unix_ms);
  status.set_ended_unix_ms(run.job.ended_unix_ms);
  status.set_weights_digest(run.job.weights_digest);
  status.set_workers(run.job.spec.resources().workers());
  status.set_stage(run.job.spec.zero_optimization().stage());
  const uint32_t ranks = run.World() == 0 ? run.job.spec.resources().workers() : run.World();
  *status.mutable_mesh() = MeshMessage(run.job.spec, ranks);
  status.set_placement(PlacementOf(run));
  status.set_first_step(run.job.first_step);
  if (!run.job.resume.checkpoint().empty()) *status.mutable_resume() = run.job.resume;
  if (run.job.checkpoint.step() != 0) *status.mutable_checkpoint() = run.job.checkpoint;
  if (run.offload != nullptr) {
    if (run.offload->map.map_version != 0) {
      status.mutable_version()->set_epoch(run.offload->epoch());
      status.mutable_version()->set_step(run.job.committed_step);
    }
  }
  status.set_steps_lost(run.job.steps_lost);
  // The newest run of a name has the folder of that name.
  const auto newest = newest_.find(run.job.spec.name());
  const bool is_newest = newest != newest_.end() && newest->second == run.job.run_id;
  status.set_directory(absl::StrCat("jobs/", run.job.spec.name(),
                                    is_newest ? "" : absl::StrCat("@", run.job.run_id)));
  return status;
}

std::string Core::WaitsFor(const Run& run, const Moment& moment) const {
  const bool finishes = run.job.saving || run.job.committed_step == run.job.spec.steps();
  if (run.offload != nullptr && !run.Live() && run.job.state == v1::JOB_STATE_RECOVERING &&
      finishes && !run.offload->no_room_since && !MissesEvaluation(run)) {
    const std::vector<std::string> late = StoresNotReady(run, 0);
    if (!late.empty()) return AtMostThree(late);
    if (!run.offload->snapshot) return "the shard stores to say what they end with";
    return absl::StrCat("the checkpoint of step ", run.offload->snapshot->step);
  }
  if (!run.Live() || run.Failing()) return "";
  const bool starting = run.job.state == v1::JOB_STATE_PLACING || Starting(run);
  if (!starting && !run.return_deadline) return "";
  std::vector<std::string> missing;
  if (run.offload != nullptr) {
    missing = StoresNotOpen(run);
    if (missing.empty()) missing = StoresNotReady(run, 0);
  }
  for (uint32_t rank = 0; rank < run.World(); ++rank) {
    const RankState& state = run.ranks[rank];
    if (state.record.ended || (run.return_deadline ? state.present : state.arrived)) continue;
    if (run.offload != nullptr && !run.offload->assigned && !run.return_deadline) continue;
    missing.push_back(DescribeRank(run, rank, moment));
  }
  return AtMostThree(missing);
}

absl::StatusOr<v1::JobStatus> Core::Status(const std::string& job, const Moment& moment) const {
  const auto by_name = newest_.find(job);
  const auto found = runs_.find(by_name == newest_.end() ? job : by_name->second);
  if (found == runs_.end()) return NoSuchJob(job);
  const Run& run = found->second;
  v1::JobStatus status = Brief(run);
  const absl::Duration now = moment.now - discount_;
  if (const std::string waits = WaitsFor(run, Moment{now, moment.unix_ms}); !waits.empty()) {
    status.set_reason(absl::StrCat(run.job.reason, "; waits for ", waits));
  }
  for (const RankState& state : run.ranks) {
    v1::RankStatus& rank = *status.add_ranks();
    rank.set_rank(state.record.rank);
    rank.set_member(state.record.member);
    rank.set_host(state.record.host);
    *rank.mutable_position() = PositionMessage(status.mesh(), state.record.rank);
    *rank.mutable_progress() = state.progress;
    rank.mutable_progress()->clear_usage();
    // Done, it is in none; of a rank that failed the last one is evidence.
    if (state.record.end.completed() || run.job.state == v1::JOB_STATE_COMPLETED ||
        run.job.state == v1::JOB_STATE_CANCELLED) {
      rank.mutable_progress()->clear_phase();
    }
    // The last word counts: a job may be over before the next heartbeat is due.
    if (state.record.end.has_usage()) {
      *rank.mutable_usage() = state.record.end.usage();
    } else if (state.progress.has_usage()) {
      *rank.mutable_usage() = state.progress.usage();
    }
    const Member* member = members_.Find(state.record.member);
    rank.set_heartbeat_age_ms(member == nullptr ||
                                      member->hello.incarnation() != state.record.incarnation
                                  ? -1
                                  : absl::ToInt64Milliseconds(now - member->last_heard));
  }
  for (const auto& [index, event] : run.events) *status.add_events() = event;
  for (const v1::ShardPlan& plan : run.job.plan) *status.add_plan() = plan;
  if (run.offload == nullptr) return status;
  for (const StoreSlot& slot : run.offload->slots) {
    v1::StoreStatus& store = *status.add_stores();
    store.set_member(slot.store.member());
    store.set_host(slot.store.host());
    store.set_phase(slot.lost ? v1::STORE_PHASE_FAILED : slot.report.phase());
    *store.mutable_version() = slot.report.version();
    store.set_generation(slot.report.generation());
    *store.mutable_usage() = slot.report.usage();
    store.set_sealed_step(slot.report.sealed_step());
    store.set_problem(slot.lost ? *slot.lost : slot.report.problem());
  }
  if (const auto plan = PlanStore(run.job.spec); plan.ok()) *status.mutable_store_plan() = *plan;
  return status;
}

std::vector<v1::JobStatus> Core::List() const {
  std::vector<v1::JobStatus> jobs;
  for (const auto& [order, run_id] : by_order_) jobs.push_back(Brief(runs_.at(run_id)));
  return jobs;
}

void Core::AddHeld(const std::string& incarnation, v1::Node* node) const {
  for (const auto& [run_id, run] : runs_) {
    if (run.offload == nullptr || IsEnded(run.job.state)) continue;
    for (const StoreSlot& slot : run.offload->slots) {
      if (slot.store.incarnation() != incarnation) continue;
      const v1::StoreUsage& usage = slot.report.usage();
      node->set_chunks(node->chunks() + usage.chunks());
      node->set_held_bytes(node->held_bytes() + usage.master_bytes() + usage.exp_avg_bytes() +
                           usage.exp_avg_sq_bytes() + usage.parameter_bytes() +
                           usage.staging_bytes());
      node->set_held_nvme_bytes(node->held_nvme_bytes() + usage.nvme_bytes());
    }
  }
}

std::vector<v1::Node> Core::Nodes(const Moment& moment) const {
  std::vector<v1::Node> nodes;
  const absl::Duration now = moment.now - discount_;
  for (const auto& [name, member] : members_.all()) {
    v1::Node& node = nodes.emplace_back();
    *node.mutable_hello() = member.hello;
    node.set_state(member.lost                                ? "lost"
                   : member.assignment || member.says_running ? "running"
                                                              : "idle");
    node.set_heartbeat_age_ms(absl::ToInt64Milliseconds(now - member.last_heard));
    node.set_since_unix_ms(member.since_unix_ms);
    if (member.lost) node.set_lost_reason(member.lost_reason);
    if (member.hello.kind() == v1::MEMBER_KIND_STORE && !member.lost) {
      const StoreUse use = ReservedOn(name, member.hello.incarnation(), nullptr);
      node.set_reserved_bytes(use.memory);
      node.set_reserved_nvme_bytes(use.nvme);
      node.set_jobs(use.jobs);
      AddHeld(member.hello.incarnation(), &node);
      if (use.jobs != 0) node.set_state("running");
    }
    if (!member.assignment) continue;
    const auto run = runs_.find(member.assignment->run_id);
    if (run == runs_.end()) continue;
    node.set_job(run->second.job.spec.name());
    node.set_rank(member.assignment->rank);
  }
  return nodes;
}

}  // namespace zeroshard::coordinator
