#include "worker/zero/reduce.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

// Two ranges that a unit fills, and one that is still being sent.
constexpr int kBuffersInFlight = 3;

char* Shift(void* base, int64_t elements, DType type) {
  return static_cast<char*>(base) + elements * static_cast<int64_t>(SizeOf(type));
}

}  // namespace

// Room for ranges, and the ranges that are done and not yet on their way.
class GradientReducer::UnitSink : public GradientSink {
 public:
  UnitSink(GradientReducer* owner, int unit) : owner_(*owner), unit_(unit) {}
  // Of a backward that was cut short: what was sent of it still reads the buffers.
  ~UnitSink() override {
    for (const Range& range : ranges_) {
      for (const Event& event : range.events) event.Wait().IgnoreError();
    }
  }

  absl::StatusOr<void*> Acquire(int64_t begin, int64_t end) override {
    UnitState& unit = State();
    if (begin < 0 || end > unit.table->length || begin > end || begin % 64 != 0 || end % 64 != 0) {
      return absl::InternalError(
          absl::StrFormat("gradient range [%d, %d) of %s is not part of its %d elements", begin,
                          end, unit.table->name, unit.table->length));
    }
    Range range;
    range.begin = begin;
    range.end = end;
    if (Direct()) {
      range.data = unit.Gradient(begin);
    } else {
      const size_t bytes = static_cast<size_t>(end - begin) * SizeOf(Wire());
      ZS_ASSIGN_OR_RETURN(range.buffer, owner_.TakeTransient(bytes));
      range.data = range.buffer.data();
    }
    ZeroOutside(range);
    ranges_.push_back(std::move(range));
    return ranges_.back().data;
  }

  absl::Status Done(int64_t begin, int64_t end) override {
    const auto it = std::find_if(ranges_.begin(), ranges_.end(), [&](const Range& r) {
      return begin >= r.begin && end <= r.end && begin <= end;
    });
    if (it == ranges_.end()) {
      return absl::InternalError(absl::StrFormat("gradient range [%d, %d) of %s was not acquired",
                                                 begin, end, State().table->name));
    }
    Range& range = *it;
    ZeroFrozen(range, begin, end);
    const bool adjacent = begin == range.ready.end || end == range.ready.begin;
    if (range.ready.size() > 0 && !adjacent) ZS_RETURN_IF_ERROR(Send(&range));
    if (range.ready.size() == 0) {
      range.ready = {begin, end};
    } else {
      range.ready = {std::min(begin, range.ready.begin), std::max(end, range.ready.end)};
    }
    range.done += end - begin;
    const bool complete = range.done >= range.end - range.begin;
    if (complete || range.ready.size() >= owner_.policy_.options.reduce_bucket)
      ZS_RETURN_IF_ERROR(Send(&range));
    if (complete) {
      if (range.buffer.bytes() > 0) Give(&range);
      ranges_.erase(it);
    }
    return absl::OkStatus();
  }

 private:
  struct Range {
    int64_t begin = 0, end = 0;
    void* data = nullptr;
    Buffer buffer;
    std::vector<Event> events;   // that read `data`, or write there
    std::vector<Event> reduced;  // of them, those behind which this rank's sums lie there
    ElementRange ready;          // done, contiguous, not yet sent
    int64_t done = 0;
  };

  UnitState& State() { return owner_.units_[static_cast<size_t>(unit_)]; }
  DType Wire() const { return owner_.policy_.options.dtype; }
  // Written straight into the unit's whole gradient.
  bool Direct() {
    return State().trained && owner_.policy_.gradient_mode == GradientMode::kFullWire;
  }

  // The sums are kept elsewhere than in the transient memory they are reduced from.
  bool Kept() const { return owner_.policy_.KeepsGradient(unit_); }

  // The range's buffer is free for others once it has left, and what is not kept is squared.
  void Give(Range* range) {
    std::function<absl::Status()> last_use;
    const ElementRange owned =
        Owned(State().layout, owner_.comm_->rank(), {range->begin, range->end});
    if (!range->reduced.empty() && owned.size() > 0) {
      const void* sums = Shift(range->data, owned.begin - range->begin, Wire());
      last_use = [this, owned, sums, reduced = std::move(range->reduced)]() -> absl::Status {
        for (const Event& event : reduced) ZS_RETURN_IF_ERROR(owner_.compute_->WaitFor(event));
        owner_.squares_->Add(unit_, owned, sums, Wire());
        return absl::OkStatus();
      };
    }
    owner_.in_flight_.GiveAfter(std::move(range->buffer), std::move(range->events),
                                std::move(last_use));
  }

  // Zeroes what no tensor covers.
  void ZeroOutside(const Range& range) {
    int64_t covered = range.begin;
    for (const ParameterInfo& p : State().table->parameters) {
      if (p.offset >= range.end) break;
      if (p.offset > covered) ZeroElements(range, covered, p.offset);
      covered = std::max(covered, std::min(range.end, p.offset + p.size));
    }
    ZeroElements(range, covered, range.end);
  }

  void ZeroFrozen(const Range& range, int64_t begin, int64_t end) {
    for (const ParameterInfo& p : State().table->parameters) {
      if (!p.trainable)
        ZeroElements(range, std::max(begin, p.offset), std::min(end, p.offset + p.size));
    }
  }

  void ZeroElements(const Range& range, int64_t begin, int64_t end) {
    if (begin >= end) return;
    owner_.ops_->Zero(Shift(range.data, begin - range.begin, Wire()),
                      static_cast<size_t>(end - begin) * SizeOf(Wire()));
  }

  absl::Status Send(Range* range) {
    const ElementRange ready = std::exchange(range->ready, {});
    UnitState& unit = State();
    if (!unit.trained || ready.size() == 0) return absl::OkStatus();
    void* data = Shift(range->data, ready.begin - range->begin, Wire());
    if (owner_.policy_.gradient_mode == GradientMode::kFullAccumulate) {
      if (owner_.comm_->rank() >= owner_.contributors_) return absl::OkStatus();
      owner_.ops_->AccumulateF32(data, Wire(), ready.size(), owner_.round_ > 0,
                                 static_cast<float*>(unit.Gradient(ready.begin)));
      return absl::OkStatus();
    }
    const ElementRange owned = Owned(unit.layout, owner_.comm_->rank(), ready);
    void* output = nullptr;
    if (owned.size() > 0) {
      output = Kept() ? unit.Gradient(owned.begin)
                      : Shift(range->data, owned.begin - range->begin, Wire());
    }
    const Event event = owner_.Reduce(unit_, data, ready, output, unit.gradient_type,
                                      owner_.round_ > 0, Phase::kBackward, owner_.contributors_);
    if (range->buffer.bytes() > 0) range->events.push_back(event);
    if (Direct() || (Kept() && owner_.leaves_at_once_)) owner_.events_.push_back(event);
    if (!owner_.policy_.options.overlap) ZS_RETURN_IF_ERROR(owner_.compute_->WaitFor(event));
    if (Kept()) return owner_.PushFinal(unit_, owned, event);
    range->reduced.push_back(event);
    range->events.push_back(owner_.pusher_->PushFrom(unit_, owned, output, event));
    return absl::OkStatus();
  }

  GradientReducer& owner_;
  const int unit_;
  std::vector<Range> ranges_;
};

GradientReducer::GradientReducer(const ZeroPolicy* policy, std::vector<UnitState>* units,
                                 Communicator* comm, Device* device, Ops* ops,
                                 GradientPusher* pusher, GradientSquares* squares)
    : policy_(*policy),
      units_(*units),
      comm_(comm),
      ops_(ops),
      compute_(device->compute()),
      pusher_(pusher),
      squares_(squares),
      leaves_at_once_(units->size() > 1 && !policy->KeepsGradient(1)),
      in_flight_(device, kBuffersInFlight) {
  for (size_t u = 0; u < units->size(); ++u)
    sinks_.push_back(std::make_unique<UnitSink>(this, static_cast<int>(u)));
}

GradientReducer::~GradientReducer() {
  // Errors do not matter any more, only that nobody reads the buffers.
  while (!Drain().ok()) {
  }
}

void GradientReducer::BeginRound(uint64_t step, int64_t round, int contributors) {
  step_ = step;
  round_ = round;
  contributors_ = contributors;
}

GradientSink* GradientReducer::Sink(int unit) { return sinks_[static_cast<size_t>(unit)].get(); }

Event GradientReducer::Reduce(int unit, const void* input, ElementRange range, void* output,
                              DType output_type, bool accumulate, Phase phase, int contributors) {
  const UnitState& state = units_[static_cast<size_t>(unit)];
  ReduceScatterArgs args;
  args.input = input;
  args.type = policy_.options.dtype;
  for (int r = 0; r < comm_->size(); ++r)
    args.counts.push_back(Owned(state.layout, r, range).size());
  args.contributors = contributors;
  args.output = output;
  args.output_type = output_type;
  args.accumulate = accumulate;
  return comm_->ReduceScatter(std::move(args),
                              {.phase = phase, .unit = state.table->name, .step = step_},
                              compute_->Record());
}

absl::Status GradientReducer::PushFinal(int unit, ElementRange owned, const Event& reduced) {
  if (pusher_ == nullptr) return absl::OkStatus();
  if (round_ + 1 == policy_.rounds && unit != 0) pusher_->Push(unit, owned, reduced);
  return pusher_->Advance();
}

absl::Status GradientReducer::ReduceApart(int unit, Buffer contribution, ElementRange range,
                                          void* output) {
  const Event event = Reduce(unit, contribution.data(), range, output, policy_.accumulate_type,
                             round_ > 0, Phase::kBackward, contributors_);
  in_flight_.GiveAfter(std::move(contribution), {event});
  if (leaves_at_once_) events_.push_back(event);
  return policy_.options.overlap ? absl::OkStatus() : compute_->WaitFor(event);
}

absl::StatusOr<Buffer> GradientReducer::TakeTransient(size_t bytes) {
  ZS_ASSIGN_OR_RETURN(const bool full, in_flight_.Full());
  Waiting waiting(full ? waits_ : nullptr,
                  pusher_ != nullptr ? WaitKind::kStores : WaitKind::kRanks);
  return in_flight_.Take(bytes);
}

absl::Status GradientReducer::Drain() {
  ZS_RETURN_IF_ERROR(in_flight_.Drain());
  return WaitForKept();
}

absl::Status GradientReducer::WaitForKept() {
  absl::Status status;
  for (const Event& event : std::exchange(events_, {})) status.Update(event.Wait());
  return status;
}

absl::Status GradientReducer::ReduceAccumulated(int unit_index) {
  UnitState& unit = units_[static_cast<size_t>(unit_index)];
  const DType wire = policy_.options.dtype;
  const int64_t length = unit.layout.length;
  ZS_ASSIGN_OR_RETURN(Buffer sum, in_flight_.Take(static_cast<size_t>(length) * SizeOf(wire)));
  ops_->Convert(unit.gradient.data(), DType::kF32, length, sum.data(), wire);
  void* own = Shift(sum.data(), unit.own_begin, wire);
  const Event event =
      Reduce(unit_index, sum.data(), {0, length}, own, wire, false, Phase::kStep, comm_->size());
  ZS_RETURN_IF_ERROR(compute_->WaitFor(event));
  if (unit.owned() > 0)
    ops_->Convert(own, wire, unit.owned(), unit.Gradient(unit.own_begin), DType::kF32);
  std::vector<Event> readers;
  if (pusher_ != nullptr && !(unit_index == 0 && leaves_embedding_))
    readers.push_back(pusher_->PushFrom(unit_index, {unit.own_begin, unit.own_end}, own, event));
  in_flight_.GiveAfter(std::move(sum), std::move(readers));
  return absl::OkStatus();
}

// "After the last micro-batch the sum is rounded once to the wire type": in place.
void GradientReducer::RoundToWire(UnitState* unit) {
  if (unit->gradient_type == policy_.options.dtype || unit->owned() == 0) return;
  ops_->RoundInPlace(static_cast<float*>(unit->Gradient(unit->own_begin)), unit->owned(),
                     policy_.options.dtype);
}

absl::Status GradientReducer::FinishRounds() {
  if (leaves_at_once_) {
    ZS_RETURN_IF_ERROR(in_flight_.FinishUses());
    ZS_RETURN_IF_ERROR(WaitForKept());
  } else {
    ZS_RETURN_IF_ERROR(Drain());
  }
  for (size_t u = 0; u < units_.size(); ++u) {
    if (!units_[u].trained) continue;
    if (policy_.gradient_mode == GradientMode::kFullAccumulate) {
      ZS_RETURN_IF_ERROR(ReduceAccumulated(static_cast<int>(u)));
    } else if (pusher_ == nullptr || u == 0) {  // the others are rounded where they are pushed
      RoundToWire(&units_[u]);
    }
  }
  return pusher_ == nullptr ? absl::OkStatus() : pusher_->FinishRounding();
}

}  // namespace zeroshard
