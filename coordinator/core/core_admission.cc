// Which jobs are taken, by the memory of the workers that are here.
#include "absl/strings/str_cat.h"
#include "common/plan/planner.h"
#include "coordinator/core/admission.h"
#include "coordinator/core/core.h"
#include "coordinator/core/placement.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {

std::vector<WorkerRoom> Core::WorkerRooms() const {
  std::vector<WorkerRoom> rooms;
  for (const auto& [name, member] : members_.all()) {
    if (!member.lost && member.hello.kind() == v1::MEMBER_KIND_WORKER)
      rooms.push_back(RoomOf(member.hello));
  }
  return rooms;
}

absl::Status Core::WorkersCanHold(const v1::JobSpec& spec,
                                  const std::vector<v1::ShardPlan>& plan) const {
  const std::vector<RankNeed> needs = NeedsOf(spec, plan);
  const std::vector<WorkerRoom> rooms = WorkerRooms();
  if (!CannotHold(needs, rooms)) return absl::OkStatus();
  const std::string change = SmallestChange(spec, rooms, [this](const v1::JobSpec& variant) {
    return HasStores() && CanEverFit(variant).ok();
  });
  return absl::ResourceExhaustedError(absl::StrCat(
      "job ", spec.name(),
      " does not fit the memory of the workers: ", DescribeShortage(needs, rooms), ". ",
      change.empty() ? "Use a higher ZeRO stage, more hosts, a smaller micro-batch, "
                       "activation_checkpointing or a smaller model"
                     : absl::StrCat("What to do: ", change),
      ". See also zeroshard plan; with submit --force it waits for larger workers"));
}

std::vector<Member*> Core::WithRoom(const v1::JobSpec& spec, const std::vector<RankNeed>& needs,
                                    const std::vector<Member*>& members, std::string* shortage) {
  std::vector<WorkerRoom> rooms;
  for (const Member* member : members) rooms.push_back(RoomOf(member->hello));
  std::vector<Member*> chosen;
  for (const size_t worker : WorkersFor(spec, needs, rooms)) chosen.push_back(members[worker]);
  if (chosen.empty()) *shortage = DescribeShortage(needs, rooms);
  return chosen;
}

bool Core::HasStores() const {
  for (const auto& [name, member] : members_.all()) {
    if (!member.lost && member.hello.kind() == v1::MEMBER_KIND_STORE) return true;
  }
  return false;
}

const std::vector<RankNeed>& Core::Needs(Run& run, uint32_t ranks) {
  const auto [needs, fresh] = run.needs.try_emplace(ranks);
  if (!fresh) return needs->second;
  if (run.job.plan.size() == ranks || run.job.plan.empty()) {
    needs->second = NeedsOf(run.job.spec, run.job.plan);
    return needs->second;
  }
  v1::JobSpec spec = run.job.spec;
  spec.mutable_resources()->set_workers(ranks);
  const auto plan = PlanShards(spec);
  if (plan.ok()) needs->second = NeedsOf(spec, *plan);
  return needs->second;
}

bool Core::NoneCanHold(Run& run) const {
  return CannotHold(Needs(run, run.job.spec.resources().workers()), WorkerRooms());
}

}  // namespace zeroshard::coordinator
