// Stores that were asked to leave: what they alone hold is saved before they may go.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/core/core.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {

bool Core::IsHeldByLeavingAlone(const Run& run, bool* being_copied) const {
  const OffloadedRun& o = *run.offload;
  *being_copied = false;
  const auto leaves = [this](const StoreSlot& slot) {
    const Member* member = slot.lost ? nullptr : MemberOf(slot);
    return member != nullptr && member->leaving;
  };
  if (std::none_of(o.slots.begin(), o.slots.end(), leaves)) return false;
  struct Chunk {
    bool leaves = false, stays = false, copied = false;
  };
  std::vector<Chunk> chunks(o.needs.chunks.size());
  for (const StoreSlot& slot : o.slots) {
    const Member* member = MemberOf(slot);
    if (slot.lost || member == nullptr) continue;
    const bool there = slot.heard && slot.was_ready;
    for (const uint32_t number : slot.chunks) {
      if (number >= chunks.size()) continue;
      Chunk& chunk = chunks[number];
      (member->leaving ? chunk.leaves : there ? chunk.stays : chunk.copied) = true;
    }
  }
  bool alone = false;
  for (const Chunk& chunk : chunks) {
    if (!chunk.leaves || chunk.stays) continue;
    alone = true;
    *being_copied |= chunk.copied;
  }
  return alone;
}

bool Core::WaitsForSave(const Run& run) const {
  if (run.offload == nullptr || IsEnded(run.job.state)) return false;
  if (run.job.spec.checkpoint().dir().empty()) return false;
  // Without a step there is nothing to save, and the first would be lost.
  if (run.offload->parting_failed ||
      (Trained(run) && run.offload->unsaved_step == run.job.committed_step)) {
    return false;  // it cannot be
  }
  bool being_copied = false;
  return IsHeldByLeavingAlone(run, &being_copied);
}

void Core::OnStoreLeaving(Member& member, const Moment& moment, Decision* out) {
  const bool first = !std::exchange(member.leaving, true);
  const std::string who = absl::StrCat(member.hello.name(), " on ", member.hello.host());
  if (first) out->reasons.push_back(absl::StrCat(who, " was asked to leave"));
  bool may_go = true;
  for (auto& [run_id, run] : runs_) {
    if (run.offload == nullptr || IsEnded(run.job.state)) continue;
    const auto& slots = run.offload->slots;
    const bool has = std::any_of(slots.begin(), slots.end(), [&](const StoreSlot& slot) {
      return !slot.lost && slot.store.incarnation() == member.hello.incarnation();
    });
    bool being_copied = false;
    if (has && first) run.offload->parting_failed = false;  // it is tried for each of them
    if (!has || !IsHeldByLeavingAlone(run, &being_copied)) continue;
    // The next step is still decided where its folder was made: with it the store would lose it.
    const std::optional<SnapshotWork>& work = run.offload->snapshot;
    if (work && !work->direct && work->step == run.job.committed_step + 1) may_go = false;
    if (!Trained(run)) continue;
    const bool saves = WaitsForSave(run);
    const bool saved = saves && run.job.checkpoint.step() == run.job.committed_step;
    if (first) {
      AddEvent(run,
               absl::StrCat(who, " was asked to leave and holds chunks that no other store has; ",
                            saved ? absl::StrCat("the checkpoint of step ", run.job.committed_step,
                                                 " has them")
                            : saves        ? "they are saved first"
                            : being_copied ? "they are copied first"
                                           : "without a checkpoint section they are lost with it"),
               moment, out);
    }
    if (saves && !saved) MaybeSnapshotNow(run, moment, out);
    if ((saves && !saved) || (!saves && being_copied)) may_go = false;
  }
  if (!may_go) return;
  v1::CoordinatorMessage message;
  message.mutable_stop()->set_reason("no job has chunks on it that are nowhere else");
  out->actions.push_back(SendToSession{member.session, std::move(message)});
}

}  // namespace zeroshard::coordinator
