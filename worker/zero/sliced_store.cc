#include "worker/zero/sliced_store.h"

#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "worker/device/host_event.h"
#include "worker/device/host_stream.h"

namespace zeroshard {
namespace {

// Tensors begin at multiples of 64 elements, so no padding is longer.
constexpr float kZeros[64] = {};

class SlicedStore : public StateStore {
 public:
  SlicedStore(std::unique_ptr<StateStore> inner, TensorRank slice, DType type)
      : slice_(std::move(slice)), size_(SizeOf(type)), inner_(std::move(inner)) {}

  v1::StateVersion base() const override { return inner_->base(); }

  Event Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
             const Event& after) override {
    if (absl::Status status = Check("a push", step, unit, begin, end); !status.ok())
      return DoneEvent(std::move(status));
    std::vector<Event> events;
    for (const SliceRun& run : Runs(unit, begin, end)) {
      if (!run.home) continue;
      const int64_t last = run.flat + run.size;
      events.push_back(inner_->Push(step, unit, run.flat, last,
                                    static_cast<const char*>(data) + Bytes(run.local - begin),
                                    after));
      if (const int64_t padding = PaddingBehind(run); padding > 0)
        events.push_back(inner_->Push(step, unit, last, last + padding, kZeros, after));
    }
    return events.empty() ? after : AllOf(std::move(events));
  }

  Event Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out,
             const Event& after) override {
    if (absl::Status status = Check("a pull", step, unit, begin, end); !status.ok())
      return DoneEvent(std::move(status));
    char* const to = static_cast<char*>(out);
    std::vector<Event> events;
    std::vector<ElementRange> empty;  // from `begin` on
    int64_t next = begin;
    for (const SliceRun& run : Runs(unit, begin, end)) {
      events.push_back(inner_->Pull(step, unit, run.flat, run.flat + run.size,
                                    to + Bytes(run.local - begin), after));
      if (run.local > next) empty.push_back({next - begin, run.local - begin});
      next = run.local + run.size;
    }
    if (end > next) empty.push_back({next - begin, end - begin});
    if (!empty.empty()) events.push_back(Zero(to, std::move(empty), after));
    return events.empty() ? after : AllOf(std::move(events));
  }

  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t next_sample,
                                          uint64_t samples) override {
    return inner_->Commit(record, next_sample, samples);
  }
  void Abort(const std::string& reason) override { inner_->Abort(reason); }
  const OffloadCounters& counters() const override { return inner_->counters(); }

 private:
  size_t Bytes(int64_t elements) const { return static_cast<size_t>(elements) * size_; }

  std::vector<SliceRun> Runs(int unit, int64_t begin, int64_t end) const {
    return FullRuns(slice_, static_cast<size_t>(unit), {begin, end});
  }

  absl::Status Check(const char* what, uint64_t step, int unit, int64_t begin, int64_t end) const {
    const auto& units = slice_.model.units;
    const bool known = unit >= 0 && static_cast<size_t>(unit) < units.size();
    const int64_t length = known ? units[static_cast<size_t>(unit)].length : 0;
    if (known && begin >= 0 && begin <= end && end <= length) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(what, " of elements ", begin, " to ", end, " of unit ", unit, " at step ",
                     step, "; the slice of tensor rank ", slice_.rank, " of ", slice_.tensor,
                     " has ", units.size(), " units, and ", length, " elements in that one"));
  }

  Event Zero(char* to, std::vector<ElementRange> ranges, const Event& after) {
    auto zero = [this, to, ranges = std::move(ranges), after]() -> absl::Status {
      if (absl::Status status = after.Wait(); !status.ok()) return status;
      for (const ElementRange& range : ranges)
        std::memset(to + Bytes(range.begin), 0, Bytes(range.size()));
      return absl::OkStatus();
    };
    if (after.Done()) return DoneEvent(zero());
    std::call_once(late_once_, [this] { late_ = MakeHostStream("zeros"); });
    return late_->Enqueue(std::move(zero));
  }

  const TensorRank slice_;
  const size_t size_;  // bytes of an element
  std::once_flag late_once_;
  std::unique_ptr<HostStream> late_;         // zeros what its caller still uses
  const std::unique_ptr<StateStore> inner_;  // goes first: it ends what is on its way
};

}  // namespace

std::unique_ptr<StateStore> MakeSlicedStore(std::unique_ptr<StateStore> inner, TensorRank slice,
                                            DType type) {
  if (slice.tensor == 1) return inner;
  return std::make_unique<SlicedStore>(std::move(inner), std::move(slice), type);
}

}  // namespace zeroshard
