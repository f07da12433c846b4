#include "worker/zero/squares.h"

#include "common/status_macros.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<GradientSquares>> GradientSquares::Create(size_t units,
                                                                         Device* device, Ops* ops) {
  std::unique_ptr<GradientSquares> squares(new GradientSquares(device, ops));
  const size_t bytes = units * sizeof(NormAccumulator);
  ZS_ASSIGN_OR_RETURN(squares->sums_, device->Allocate(bytes, MemoryKind::kBuffers));
  ZS_ASSIGN_OR_RETURN(squares->read_, device->AllocateHost(bytes));
  return squares;
}

void GradientSquares::Begin() { ops_->Zero(sums_.data(), sums_.bytes()); }

void GradientSquares::Add(int unit, const void* gradient, int64_t n, DType type) {
  ops_->AddSquares(gradient, n, type, sums_.as<NormAccumulator>() + unit);
}

Event GradientSquares::Read() { return compute_->Copy(read_.data(), sums_.data(), sums_.bytes()); }

}  // namespace zeroshard
