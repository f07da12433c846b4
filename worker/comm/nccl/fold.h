// The sum in rank order as one arithmetic for GPU and CPU: the kernel (cuda/fold_kernel.cu) and its
// test on the CPU compile these same functions.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "worker/ops/cuda/host_device.h"

namespace zeroshard {

// out[i] = round(((start + c_0[i]) + c_1[i]) + ...) for i < count, as FoldInRankOrder
// (worker/comm/fold.h) has it: in fp32, start is out[i] where `accumulate`, else +0. All memory is
// the device's, aligned to its elements. `out` may be `own` where the types are the same.
struct FoldArgs {
  // Contribution `own_rank` lies at `own` (-1: none does); the others follow each other, in order,
  // every `stride` elements from `staged`.
  const void* staged = nullptr;
  int64_t stride = 0;
  const void* own = nullptr;
  int own_rank = -1;
  int contributors = 0;
  DType type = DType::kF32;  // of the contributions: fp32, bf16 or fp16
  int64_t count = 0;
  bool accumulate = false;
  void* out = nullptr;
  DType output_type = DType::kF32;  // fp32, or `type`
};

// N neighbours, moved as one where memory is aligned to them.
template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T values[N];
};

// Elements [first, first + N).
template <typename In, typename Out, int N>
ZS_HOST_DEVICE void FoldPack(const FoldArgs& args, int64_t first) {
  Pack<Out, N>* const out = reinterpret_cast<Pack<Out, N>*>(static_cast<Out*>(args.out) + first);
  float sums[N] = {};
  if (args.accumulate) {
    const Pack<Out, N> start = *out;
    for (int i = 0; i < N; ++i) sums[i] = cuda::Element<Out>::Widen(start.values[i]);
  }
  int64_t at = first;  // of the next staged one
  for (int rank = 0; rank < args.contributors; ++rank) {
    const In* from = nullptr;
    if (rank == args.own_rank) {
      from = static_cast<const In*>(args.own) + first;
    } else {
      from = static_cast<const In*>(args.staged) + at;
      at += args.stride;
    }
    const Pack<In, N> pack = *reinterpret_cast<const Pack<In, N>*>(from);
    for (int i = 0; i < N; ++i) sums[i] += cuda::Element<In>::Widen(pack.values[i]);
  }
  Pack<Out, N> result;
  for (int i = 0; i < N; ++i) result.values[i] = cuda::Element<Out>::Narrow(sums[i]);
  *out = result;
}

constexpr int kFoldPack = 4;

// kFoldPack where all of the memory is aligned to that many elements, else 1.
inline int FoldWidth(const FoldArgs& args) {
  const auto aligned = [](const void* at, DType type) {
    return reinterpret_cast<uintptr_t>(at) % (kFoldPack * SizeOf(type)) == 0;
  };
  const bool all = aligned(args.staged, args.type) && aligned(args.own, args.type) &&
                   aligned(args.out, args.output_type) && args.stride % kFoldPack == 0;
  return all ? kFoldPack : 1;
}

// Calls visit(in, out) with values of the element types that `args` names.
template <typename Visit>
auto VisitFoldTypes(const FoldArgs& args, const Visit& visit) {
  return cuda::WithElement(args.type, [&](auto in) {
    return args.output_type == DType::kF32 ? visit(in, float{}) : visit(in, in);
  });
}

}  // namespace zeroshard
