// Which workers a job gets, how many where there are too few for all of its ranks, and whether
// those behind it have to wait for that.
#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/plan/job_mesh.h"
#include "coordinator/core/core.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

bool IsIdle(const Member& member) {
  return !member.lost && member.hello.kind() == v1::MEMBER_KIND_WORKER && member.session != 0 &&
         !member.assignment && !member.says_running;
}

}  // namespace

std::vector<Member*> Core::Choose(Run& run, const Moment& moment, std::string* why_not) {
  const uint32_t all = run.job.spec.resources().workers();
  std::vector<Member*> chosen = ChooseFor(run, all, why_not);
  const uint32_t least = run.job.spec.resources().min_workers();
  if (!chosen.empty() || least == 0 || least >= all) return chosen;
  if (!run.short_since) run.short_since = moment.now;
  const absl::Duration until = *run.short_since + options_.replacement_grace;
  if (moment.now < until) {
    ScheduleBy(until);
    absl::StrAppend(why_not, "; after ", Age(options_.replacement_grace),
                    " it goes on with fewer, at least ", least);
    return {};
  }
  // Each of its ranks that is still on its way out would be one fewer.
  if (const Member* member = StillHas(run, /*rank_zero=*/false)) {
    absl::StrAppend(why_not, "; waits for ", member->hello.name(), " on ", member->hello.host(),
                    " to stop");
    return {};
  }
  // In whole replicas of the model, of which `all` and `least` are multiples.
  const int64_t replica = RanksOfReplica(run.job.spec);
  for (int64_t ranks = all - replica; ranks >= least; ranks -= replica) {
    std::string fewer;
    chosen = ChooseFor(run, static_cast<uint32_t>(ranks), &fewer);
    if (!chosen.empty()) return chosen;
  }
  absl::StrAppend(why_not, "; it can go on with ", least);
  return {};
}

std::vector<Member*> Core::ChooseFor(Run& run, uint32_t ranks, std::string* why_not, bool own_too) {
  const v1::JobSpec& spec = run.job.spec;
  const size_t wanted = ranks;
  // A deterministic job runs on processes that compute alike.
  std::map<std::string, std::vector<Member*>> groups;
  size_t idle = 0;
  size_t workers = 0;
  for (auto& [name, member] : members_.all()) {
    if (member.lost || member.hello.kind() != v1::MEMBER_KIND_WORKER) continue;
    ++workers;
    const bool own = member.assignment && member.assignment->run_id == run.job.run_id;
    if (!IsIdle(member) && !(own_too && own)) continue;
    ++idle;
    groups[spec.deterministic() ? member.hello.fingerprint() : ""].push_back(&member);
  }
  const std::vector<RankNeed>& needs = Needs(run, ranks);
  std::vector<Member*> best;
  size_t best_of = 0;
  std::string shortage;
  for (auto& [fingerprint, group] : groups) {
    if (group.size() < wanted || group.size() <= best_of) continue;
    // Without a plan nothing is known of what it takes.
    std::vector<Member*> chosen = WithRoom(
        spec, needs.size() == wanted ? needs : std::vector<RankNeed>(wanted), group, &shortage);
    if (chosen.empty()) continue;
    best = std::move(chosen);
    best_of = group.size();
  }
  if (!best.empty()) {
    best.resize(wanted);
    return best;
  }
  *why_not = absl::StrCat("needs ", wanted, wanted == 1 ? " worker, " : " workers, ", idle,
                          " idle of ", workers);
  if (!shortage.empty()) {
    absl::StrAppend(why_not, ", whose memory does not hold it: ", shortage);
  } else if (spec.deterministic() && idle >= wanted) {
    std::vector<std::string> kinds;
    for (const auto& [fingerprint, group] : groups) {
      kinds.push_back(absl::StrCat(group.size(), " of ", Quoted(fingerprint)));
    }
    absl::StrAppend(why_not, ", but a deterministic job needs them with one numeric fingerprint: ",
                    AtMostThree(kinds));
  }
  return {};
}

const Member* Core::StillHas(const Run& run, bool rank_zero) const {
  for (const auto& [name, member] : members_.all()) {
    if (!member.lost && member.assignment && member.assignment->run_id == run.job.run_id &&
        (!rank_zero || member.assignment->rank == 0)) {
      return &member;
    }
  }
  return nullptr;
}

bool Core::WantsMoreThanThereAre(const Run& run, const Moment& moment) {
  if (moment.now < members_back_) {
    ScheduleBy(members_back_);
    return false;
  }
  const v1::ResourceSpec& resources = run.job.spec.resources();
  const uint32_t least =
      resources.min_workers() == 0 ? resources.workers() : resources.min_workers();
  std::map<std::string, size_t> kinds;
  for (const auto& [name, member] : members_.all()) {
    if (member.hello.kind() != v1::MEMBER_KIND_WORKER) continue;
    // A process that died is soon started again.
    const absl::Duration until =
        member.last_heard + options_.member_timeout + options_.return_grace;
    if (member.lost && moment.now >= until) continue;
    if (member.lost) ScheduleBy(until);
    ++kinds[run.job.spec.deterministic() ? member.hello.fingerprint() : ""];
  }
  return std::none_of(kinds.begin(), kinds.end(),
                      [least](const auto& kind) { return kind.second >= least; });
}

bool Core::CanGrow(Run& run, const Moment& moment) {
  const uint32_t all = run.job.spec.resources().workers();
  if (run.World() >= all || run.job.saving || run.job.committed_step >= run.job.spec.steps()) {
    return false;
  }
  // What comes and goes must not keep it from training.
  const absl::Duration until = run.opened + options_.replacement_grace;
  if (moment.now < until) return false;
  const Member* mine = members_.Find(run.ranks.front().record.member);
  if (mine == nullptr) return false;
  const auto alike = [&](const Member& member) {
    return !run.job.spec.deterministic() || member.hello.fingerprint() == mine->hello.fingerprint();
  };
  const bool any =
      std::any_of(members_.all().begin(), members_.all().end(),
                  [&](const auto& entry) { return IsIdle(entry.second) && alike(entry.second); });
  if (!any || OthersWait(run, moment)) return false;
  const int64_t replica = RanksOfReplica(run.job.spec);
  for (int64_t ranks = all; ranks > run.World(); ranks -= replica) {
    std::string why_not;
    const std::vector<Member*> chosen =
        ChooseFor(run, static_cast<uint32_t>(ranks), &why_not, /*own_too=*/true);
    if (!chosen.empty() && alike(*chosen.front())) return true;
  }
  return false;
}

bool Core::OthersWait(const Run& run, const Moment& moment) {
  for (const std::set<uint64_t>* orders : {&recovering_, &queue_}) {
    for (const uint64_t order : *orders) {
      const auto entry = by_order_.find(order);
      if (entry == by_order_.end() || entry->second == run.job.run_id) continue;
      Run& other = runs_.at(entry->second);
      if (other.Live() || (other.offload != nullptr && other.offload->gave_way)) continue;
      if (!NoneCanHold(other) && !WantsMoreThanThereAre(other, moment)) return true;
    }
  }
  return false;
}

}  // namespace zeroshard::coordinator
