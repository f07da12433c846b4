// From the arguments of an Ops call to those of the attention kernels: which kernels, how many
// blocks. Pure functions of the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "worker/ops/cuda/attention_params.h"
#include "worker/ops/ops.h"

namespace zeroshard::cuda::attention {

// kTensorCores: bf16 or fp16, a head dimension and leading dimensions that are multiples of 8, at
// most 128, and addresses that are multiples of 16 bytes. kPlain: everything else.
enum class Path { kTensorCores, kPlain };

// addresses: of all tensors of the call. The same shapes in one process give the same path as long
// as the addresses are aligned alike: buffers are, at 64 bytes.
inline Path ChoosePath(const AttentionArgs& args, std::initializer_list<const void*> addresses) {
  const bool aligned = std::all_of(addresses.begin(), addresses.end(), [](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % 16 == 0;
  });
  const bool fits = args.head_dim % 8 == 0 && args.head_dim <= 128 && args.ld_q % 8 == 0 &&
                    args.ld_k % 8 == 0 && args.ld_v % 8 == 0;
  return SizeOf(args.dtype) == 2 && aligned && fits ? Path::kTensorCores : Path::kPlain;
}

// The head dimension that the tensor core kernels are compiled for.
inline int PaddedDim(int64_t head_dim) { return head_dim <= 32 ? 32 : head_dim <= 64 ? 64 : 128; }

inline bool Drops(const DropoutArgs& args) { return DropoutThreshold(args) > 0; }

// Of checked arguments (cpu::CheckAttention); the pointers of a call's results are the caller's to
// set.
inline Params ParamsOf(const AttentionArgs& args) {
  Params p;
  p.q = args.q;
  p.k = args.k;
  p.v = args.v;
  p.ld_q = args.ld_q;
  p.ld_k = args.ld_k;
  p.ld_v = args.ld_v;
  p.batch = static_cast<int>(args.batch);
  p.seq = static_cast<int>(args.seq);
  p.heads = static_cast<int>(args.heads);
  p.kv_heads = static_cast<int>(args.kv_heads);
  p.head_dim = static_cast<int>(args.head_dim);
  p.document_start = args.document_start;
  p.scale = 1.0f / std::sqrt(static_cast<float>(args.head_dim));
  p.dropout = DropoutRuleOf(args.dropout);
  p.first_sample = args.dropout.first_sample;
  return p;
}

}  // namespace zeroshard::cuda::attention
