#include "worker/zero/push.h"

#include <algorithm>
#include <utility>

#include "common/plan/chunk_table.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

// More at once keeps no store busier: 64 MiB of bf16.
constexpr int64_t kMostBuffers = 32;

int64_t PieceElements(const ZeroOptions& options) {
  return std::clamp<int64_t>(options.push_buffer_size, 1, kChunkElements);
}

// As many pieces as the buffers that the specification allows have room for.
int Pieces(const ZeroOptions& options) {
  const int64_t each = std::min(kMostBuffers, options.push_buffer_size / PieceElements(options));
  return static_cast<int>(
      std::clamp<int64_t>(std::min(kMostBuffers, options.push_buffers) * each, 1, kMostBuffers));
}

}  // namespace

GradientPusher::GradientPusher(const ZeroPolicy* policy, std::vector<UnitState>* units,
                               StateStore* store, Device* device, Ops* ops)
    : policy_(*policy),
      units_(*units),
      store_(store),
      ops_(ops),
      compute_(device->compute()),
      piece_(PieceElements(policy->options)),
      pool_(device, Pieces(policy->options)) {}

GradientPusher::~GradientPusher() {
  while (!pool_.Drain().ok()) {
  }
  for (const Event& event : pushed_) event.Wait().IgnoreError();
}

void GradientPusher::Push(int unit, ElementRange range, const Event& after) {
  if (range.size() == 0) return;
  const UnitState& state = units_[static_cast<size_t>(unit)];
  if (state.gradient_type != policy_.options.dtype) {
    unrounded_.push_back({unit, range, after});
    return;
  }
  pushed_.push_back(
      store_->Push(step_, unit, range.begin, range.end, state.Gradient(range.begin), after));
}

Event GradientPusher::PushFrom(int unit, ElementRange range, const void* data, const Event& after) {
  if (range.size() == 0) return {};
  pushed_.push_back(store_->Push(step_, unit, range.begin, range.end, data, after));
  return pushed_.back();
}

absl::Status GradientPusher::Advance() {
  while (!unrounded_.empty() && unrounded_.front().after.Done()) {
    ZS_ASSIGN_OR_RETURN(const bool full, pool_.Full());
    if (full) break;
    ZS_RETURN_IF_ERROR(RoundFirst(false));
  }
  return absl::OkStatus();
}

absl::Status GradientPusher::FinishRounding() {
  while (!unrounded_.empty()) ZS_RETURN_IF_ERROR(RoundFirst(true));
  return absl::OkStatus();
}

// Rounds the first range, or where that must not wait as much of it as there are buffers for.
absl::Status GradientPusher::RoundFirst(bool wait) {
  Unrounded& first = unrounded_.front();
  ZS_RETURN_IF_ERROR(compute_->WaitFor(first.after));
  const UnitState& unit = units_[static_cast<size_t>(first.unit)];
  const DType wire = policy_.options.dtype;
  while (first.range.size() > 0) {
    if (!wait) {
      ZS_ASSIGN_OR_RETURN(const bool full, pool_.Full());
      if (full) return absl::OkStatus();
    }
    const int64_t begin = first.range.begin;
    const int64_t n = std::min(piece_, first.range.size());
    ZS_ASSIGN_OR_RETURN(Buffer rounded, pool_.Take(static_cast<size_t>(piece_) * SizeOf(wire)));
    ops_->Convert(unit.Gradient(begin), unit.gradient_type, n, rounded.data(), wire);
    ops_->Convert(rounded.data(), wire, n, unit.Gradient(begin), unit.gradient_type);
    Event event =
        store_->Push(step_, first.unit, begin, begin + n, rounded.data(), compute_->Record());
    pool_.GiveAfter(std::move(rounded), {std::move(event)});
    first.range.begin += n;
  }
  unrounded_.pop_front();
  return absl::OkStatus();
}

absl::Status GradientPusher::Drain() {
  ZS_RETURN_IF_ERROR(FinishRounding());
  absl::Status status = pool_.Drain();
  for (const Event& event : pushed_) {
    if (!status.ok()) break;
    status = event.Wait();
  }
  // What is left after an error is waited for when this goes away.
  if (status.ok()) pushed_.clear();
  return status;
}

}  // namespace zeroshard
