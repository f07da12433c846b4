#include "worker/zero/gather.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace zeroshard {

ParameterGather::ParameterGather(const ZeroPolicy* policy, std::vector<UnitState>* units,
                                 Communicator* comm, Device* device, Ops* ops)
    : policy_(*policy),
      units_(*units),
      comm_(comm),
      ops_(ops),
      pool_(device),
      uses_(&policy->uses),
      gathered_(policy->uses.size()),
      updated_(units->size()) {}

ParameterGather::~ParameterGather() {
  // Errors do not matter any more, only that nobody writes to the buffers.
  for (const Event& event : updated_) event.Wait().IgnoreError();
  for (const Gathered& g : gathered_) g.ready.Wait().IgnoreError();
}

void ParameterGather::BeginPass(const std::vector<UnitUse>* uses) {
  if (uses == uses_) return;
  uses_ = uses;
  gathered_.resize(std::max(gathered_.size(), uses->size()));  // all were given back
}

absl::Status ParameterGather::Issue(int use, uint64_t step) {
  const UnitUse& what = (*uses_)[static_cast<size_t>(use)];
  const UnitState& unit = units_[static_cast<size_t>(what.unit)];
  Gathered& g = gathered_[static_cast<size_t>(use)];
  const size_t size = SizeOf(unit.dtype);
  ZS_ASSIGN_OR_RETURN(g.buffer, pool_.Take(static_cast<size_t>(unit.layout.Padded()) * size));
  ops_->Copy(g.buffer.as<char>() + static_cast<size_t>(unit.own_begin) * size,
             unit.parameters.data(), static_cast<size_t>(unit.owned()) * size);
  g.ready = comm_->AllGather(g.buffer.data(), unit.layout.shard, unit.dtype,
                             {.phase = what.backward ? Phase::kBackward : Phase::kForward,
                              .unit = unit.table->name,
                              .step = step});
  g.issued = true;
  live_ += unit.layout.length;
  return absl::OkStatus();
}

absl::Status ParameterGather::Prefetch(int use, uint64_t step) {
  int64_t ahead = 0;
  for (size_t next = static_cast<size_t>(use) + 1; next < (*uses_).size(); ++next) {
    if (!(*uses_)[next].gather) continue;
    const int64_t length = policy_.layouts[static_cast<size_t>((*uses_)[next].unit)].length;
    ahead += length;
    if (ahead > policy_.options.prefetch_bucket) break;
    if (gathered_[next].issued) continue;
    if (live_ + length > policy_.options.max_live) break;
    ZS_RETURN_IF_ERROR(Issue(static_cast<int>(next), step));
  }
  return absl::OkStatus();
}

absl::StatusOr<const void*> ParameterGather::BeforeUse(int use, uint64_t step) {
  const UnitUse& what = (*uses_)[static_cast<size_t>(use)];
  UnitState& unit = units_[static_cast<size_t>(what.unit)];
  Gathered& g = gathered_[static_cast<size_t>(use)];
  if (what.gather && !g.issued) ZS_RETURN_IF_ERROR(Issue(use, step));
  ZS_RETURN_IF_ERROR(Prefetch(use, step));
  if (unit.resident) {
    Event& updated = updated_[static_cast<size_t>(what.unit)];
    ZS_RETURN_IF_ERROR(updated.Wait());
    updated = Event();
    return unit.parameters.data();
  }
  ZS_RETURN_IF_ERROR(g.ready.Wait());
  return g.buffer.data();
}

void ParameterGather::AfterUse(int use) {
  const UnitUse& what = (*uses_)[static_cast<size_t>(use)];
  if (units_[static_cast<size_t>(what.unit)].resident) return;
  Gathered gathered = std::move(gathered_[static_cast<size_t>(use)]);
  gathered_[static_cast<size_t>(use)] = Gathered();
  if (what.release) {
    pool_.Give(std::move(gathered.buffer));
    live_ -= policy_.layouts[static_cast<size_t>(what.unit)].length;
    return;
  }
  // Kept: the unit's next use takes it over.
  size_t next = static_cast<size_t>(use) + 1;
  while (next < (*uses_).size() && (*uses_)[next].unit != what.unit) ++next;
  if (next < (*uses_).size()) gathered_[next] = std::move(gathered);
}

absl::Status ParameterGather::GatherUpdated(uint64_t step) {
  if (policy_.options.stage == 0) return absl::OkStatus();
  for (size_t u = 0; u < units_.size(); ++u) {
    UnitState& unit = units_[u];
    if (!unit.resident || !unit.trained) continue;
    updated_[u] = comm_->AllGather(unit.parameters.data(), unit.layout.shard, unit.dtype,
                                   {.phase = Phase::kStep, .unit = unit.table->name, .step = step});
    if (!policy_.options.overlap) ZS_RETURN_IF_ERROR(updated_[u].Wait());
  }
  return absl::OkStatus();
}

absl::Status ParameterGather::Drain() {
  for (Event& event : updated_) ZS_RETURN_IF_ERROR(event.Wait());
  return absl::OkStatus();
}

}  // namespace zeroshard
