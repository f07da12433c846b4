#include "worker/zero/squares.h"

#include <algorithm>
#include <vector>

#include "common/status_macros.h"

namespace zeroshard {
namespace {
constexpr int64_t kBlock = 64;  // elements, as the norm's blocks and the layout have it
}  // namespace

absl::StatusOr<std::unique_ptr<GradientSquares>> GradientSquares::Create(size_t units,
                                                                         Device* device, Ops* ops,
                                                                         const TensorRank* slice) {
  std::unique_ptr<GradientSquares> squares(new GradientSquares(device, ops, slice));
  const size_t bytes = units * sizeof(NormAccumulator);
  ZS_ASSIGN_OR_RETURN(squares->sums_, device->Allocate(bytes, MemoryKind::kBuffers));
  ZS_ASSIGN_OR_RETURN(squares->read_, device->AllocateHost(bytes));
  return squares;
}

void GradientSquares::Begin() { ops_->Zero(sums_.data(), sums_.bytes()); }

void GradientSquares::Add(int unit, ElementRange range, const void* gradient, DType type) {
  auto* const sum = sums_.as<NormAccumulator>() + unit;
  if (slice_ == nullptr) {
    ops_->AddSquares(gradient, range.size(), type, sum);
    return;
  }
  const auto u = static_cast<size_t>(unit);
  const std::vector<ParameterInfo>& parameters = slice_->model.units[u].parameters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    // Both at multiples of 64 or the range's own end.
    const int64_t begin = std::max(range.begin, parameters[i].offset);
    const int64_t end =
        std::min(range.end, RoundUp(parameters[i].offset + parameters[i].size, kBlock));
    if (begin >= end || !slice_->IsHome(u, i)) continue;
    const auto* from = static_cast<const char*>(gradient) +
                       static_cast<size_t>(begin - range.begin) * SizeOf(type);
    ops_->AddSquares(from, end - begin, type, sum);
  }
}

Event GradientSquares::Read() { return compute_->Copy(read_.data(), sums_.data(), sums_.bytes()); }

}  // namespace zeroshard
