// The sum in rank order as one arithmetic for GPU and CPU: the kernel (cuda/fold.cu) and its test
// on the CPU compile these same functions.
#pragma once

#include <bit>
#include <cstdint>

#include "common/types.h"

#ifdef __CUDACC__
#define ZS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ZS_HOST_DEVICE inline
#endif

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
  DType type = DType::kF32;  // of the contributions: fp32 or bf16
  int64_t count = 0;
  bool accumulate = false;
  void* out = nullptr;
  DType output_type = DType::kF32;  // fp32, or `type`
};

// Elements as they lie in memory: float, or uint16_t for bf16.
ZS_HOST_DEVICE float Widen(float value) { return value; }
ZS_HOST_DEVICE float Widen(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }
ZS_HOST_DEVICE void RoundTo(float value, float* to) { *to = value; }
ZS_HOST_DEVICE void RoundTo(float value, uint16_t* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  *to = value != value ? static_cast<uint16_t>((bits >> 16) | 0x40)
                       : static_cast<uint16_t>((bits + ((bits >> 16) & 1) + 0x7fff) >> 16);
}

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
    for (int i = 0; i < N; ++i) sums[i] = Widen(start.values[i]);
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
    for (int i = 0; i < N; ++i) sums[i] += Widen(pack.values[i]);
  }
  Pack<Out, N> result;
  for (int i = 0; i < N; ++i) RoundTo(sums[i], &result.values[i]);
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
  if (args.type == DType::kF32) return visit(float{}, float{});
  if (args.output_type == DType::kF32) return visit(uint16_t{}, float{});
  return visit(uint16_t{}, uint16_t{});
}

}  // namespace zeroshard
