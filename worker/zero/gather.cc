#include "worker/zero/gather.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "common/status_macros.h"
#include "worker/device/host_event.h"

namespace zeroshard {
namespace {

// Gathers of fewer elements than this are put on their way together: they cost latency rather than
// bandwidth, while larger ones had better not wait for each other.
constexpr int64_t kGatherTogether = int64_t{1} << 23;

// Offloaded parameters are bounded in bytes too: buffers that were given back count.
BufferPool MakePool(const ZeroOptions& options, Device* device) {
  if (!options.offload_param) return BufferPool(device);
  const auto size = static_cast<int64_t>(SizeOf(options.dtype));
  const int64_t most = std::min(options.max_live, std::numeric_limits<int64_t>::max() / size);
  return BufferPool(device, static_cast<size_t>(most * size));
}

}  // namespace

ParameterGather::ParameterGather(const ZeroPolicy* policy, std::vector<UnitState>* units,
                                 Communicator* comm, Device* device, Ops* ops, StateStore* store)
    : policy_(*policy),
      units_(*units),
      comm_(comm),
      ops_(ops),
      compute_(device->compute()),
      store_(store),
      pool_(MakePool(policy->options, device)),
      uses_(&policy->uses),
      gathered_(policy->uses.size()),
      renewals_(units->size()) {
  const ZeroOptions& o = policy->options;
  if (store != nullptr && o.stage == 3 && !o.offload_param)
    copies_ = device->NewStream("parameters");
}

ParameterGather::~ParameterGather() {
  // Errors do not matter any more, only that nobody writes to the buffers.
  for (const Renewal& renewal : renewals_) {
    renewal.pulled.Wait().IgnoreError();
    renewal.whole.Wait().IgnoreError();
  }
  for (const Gathered& g : gathered_) {
    g.own.Wait().IgnoreError();
    g.ready.Wait().IgnoreError();
  }
}

void ParameterGather::BeginPass(const std::vector<UnitUse>* uses) {
  if (uses == uses_) return;
  uses_ = uses;
  gathered_.resize(std::max(gathered_.size(), uses->size()));  // all were given back
}

absl::Status ParameterGather::Wait(const Event& pulled, const Event& rest) {
  ZS_RETURN_IF_ERROR(WaitFor(pulled, WaitKind::kStores));
  return WaitFor(rest, WaitKind::kRanks);
}

absl::Status ParameterGather::WaitFor(const Event& event, WaitKind kind) {
  if (event.state() == nullptr) return absl::OkStatus();
  Waiting waiting(waits_, kind);
  return compute_->WaitFor(event);
}

absl::Status ParameterGather::Issue(int use, uint64_t step) {
  const UnitUse& what = (*uses_)[static_cast<size_t>(use)];
  const UnitState& unit = units_[static_cast<size_t>(what.unit)];
  Gathered& g = gathered_[static_cast<size_t>(use)];
  const size_t size = SizeOf(unit.dtype);
  ZS_ASSIGN_OR_RETURN(g.buffer, pool_.Take(static_cast<size_t>(unit.layout.Padded()) * size));
  const bool owns = unit.owned() > 0, pulls = owns && Pulls(unit);
  char* const own = g.buffer.as<char>() + static_cast<size_t>(unit.own_begin) * size;
  const size_t bytes = static_cast<size_t>(unit.owned()) * size;
  const Event& kept = renewals_[static_cast<size_t>(what.unit)].pulled;
  const bool copies = owns && !pulls, late = copies && !kept.Done();
  if (copies && !late) {
    ZS_RETURN_IF_ERROR(kept.Wait());
    ops_->Copy(own, unit.parameters.data(), bytes);
  }
  // Whoever had the buffer before has been computed then.
  const Event after = compute_->Record();
  if (pulls) {
    g.own = store_->Pull(version_, what.unit, unit.own_begin, unit.own_end, own, after);
  } else if (late) {
    g.own = copies_->Copy(own, unit.parameters.data(), bytes, AllOf({after, kept}));
  }
  g.ready = comm_->AllGather(g.buffer.data(), unit.layout.shard, unit.dtype,
                             {.phase = what.backward ? Phase::kBackward : Phase::kForward,
                              .unit = unit.table->name,
                              .step = step},
                             g.own.state() != nullptr ? g.own : after);
  g.issued = true;
  live_ += unit.layout.length;
  return absl::OkStatus();
}

absl::Status ParameterGather::Prefetch(int use, uint64_t step) {
  int64_t ahead = 0;
  // A list of a whole step is long, and what it has behind a micro-batch is not needed soon.
  const size_t most = static_cast<size_t>(use) + 2 * units_.size() + 2;
  for (size_t next = static_cast<size_t>(use) + 1; next < std::min(uses_->size(), most); ++next) {
    const size_t unit = static_cast<size_t>((*uses_)[next].unit);
    if (renewals_[unit].due) ZS_RETURN_IF_ERROR(GatherWhole(unit));
    if (!(*uses_)[next].gather) continue;
    const int64_t length = policy_.layouts[unit].length;
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
  const size_t u = static_cast<size_t>(what.unit);
  UnitState& unit = units_[u];
  Gathered& g = gathered_[static_cast<size_t>(use)];
  if (renewals_[u].due) ZS_RETURN_IF_ERROR(GatherWhole(u));
  if (what.gather && !g.issued) ZS_RETURN_IF_ERROR(Issue(use, step));
  ZS_RETURN_IF_ERROR(Prefetch(use, step));
  if (unit.resident) {
    ZS_RETURN_IF_ERROR(Wait(renewals_[u].pulled, renewals_[u].whole));
    renewals_[u] = {};
    return unit.parameters.data();
  }
  ZS_RETURN_IF_ERROR(Wait(g.own, g.ready));
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

absl::Status ParameterGather::GatherWhole(size_t u) {
  const UnitState& unit = units_[u];
  Renewal& renewal = renewals_[u];
  renewal.due = false;
  renewal.whole =
      comm_->AllGather(unit.parameters.data(), unit.layout.shard, unit.dtype,
                       {.phase = Phase::kStep, .unit = unit.table->name, .step = version_},
                       renewal.pulled.state() != nullptr ? renewal.pulled : compute_->Record());
  return policy_.options.overlap ? absl::OkStatus() : Wait(renewal.pulled, renewal.whole);
}

absl::Status ParameterGather::GatherTogether(const std::vector<size_t>& units) {
  if (units.empty()) return absl::OkStatus();
  std::vector<GatherPart> parts;
  for (size_t u : units) parts.push_back({units_[u].parameters.data(), units_[u].layout.shard});
  std::string names = units_[units.front()].table->name;
  if (units.size() > 1) names += " to " + units_[units.back()].table->name;
  const std::vector<Event> events = comm_->AllGatherTogether(
      parts, policy_.options.dtype,
      {.phase = Phase::kStep, .unit = std::move(names), .step = version_}, compute_->Record());
  for (size_t i = 0; i < units.size(); ++i) {
    renewals_[units[i]].whole = events[i];
    if (!policy_.options.overlap) ZS_RETURN_IF_ERROR(WaitFor(events[i], WaitKind::kRanks));
  }
  return absl::OkStatus();
}

absl::Status ParameterGather::GatherUpdated(uint64_t step) {
  version_ = step;
  if (policy_.options.stage == 0) return absl::OkStatus();
  std::vector<size_t> together;
  int64_t elements = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    if (!units_[u].resident || !units_[u].trained) continue;
    together.push_back(u);
    elements += units_[u].layout.length;
    if (elements < kGatherTogether) continue;
    ZS_RETURN_IF_ERROR(GatherTogether(together));
    together.clear();
    elements = 0;
  }
  return GatherTogether(together);
}

void ParameterGather::PullKept(bool frozen) {
  const Event after = compute_->Record();
  for (size_t u = 0; u < units_.size(); ++u) {
    const UnitState& unit = units_[u];
    if (!unit.keeps_parameters || (!unit.trained && !frozen)) continue;
    if (unit.owned() > 0) {
      renewals_[u].pulled = store_->Pull(version_, static_cast<int>(u), unit.own_begin,
                                         unit.own_end, unit.Parameter(unit.own_begin), after);
    }
    renewals_[u].due = unit.resident;
  }
}

absl::Status ParameterGather::PullAll() {
  version_ = store_->base().step();
  PullKept(true);
  // The ranks meet when their own parts are there: one that has an error to tell waits for nobody.
  for (const Renewal& renewal : renewals_) {
    Waiting waiting(waits_, WaitKind::kStores);
    const absl::Status status = renewal.pulled.Wait();
    if (status.ok()) continue;
    store_->Abort(std::string(status.message()));  // the others' need not come any more
    return status;
  }
  return Drain();
}

absl::Status ParameterGather::PullUpdated(uint64_t step) {
  version_ = step;
  PullKept(false);
  // Gathers run in order. At stage 3 the small units that are whole are gathered when their turn
  // comes, for the stores may not have the last one before all the others are used.
  for (size_t u = 0; u < units_.size() && policy_.options.stage < 3; ++u)
    if (renewals_[u].due) ZS_RETURN_IF_ERROR(GatherWhole(u));
  return absl::OkStatus();
}

absl::Status ParameterGather::Drain() {
  for (size_t u = 0; u < renewals_.size(); ++u)
    if (renewals_[u].due) ZS_RETURN_IF_ERROR(GatherWhole(u));
  const auto await = [this](const Event& event, WaitKind kind) {
    if (event.state() == nullptr) return absl::OkStatus();
    Waiting waiting(waits_, kind);
    return event.Wait();
  };
  for (Renewal& renewal : renewals_) {
    ZS_RETURN_IF_ERROR(await(renewal.pulled, WaitKind::kStores));
    ZS_RETURN_IF_ERROR(await(renewal.whole, WaitKind::kRanks));
    renewal = {};
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
