#include "worker/ops/cuda/attention.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/ops/attention.h"
#include "worker/ops/cached_attention.h"
#include "worker/ops/cuda/attention_launch.h"
#include "worker/ops/cuda/attention_plain.h"
#include "worker/ops/cuda/attention_plan.h"
#include "worker/ops/cuda/launch.h"

namespace zeroshard::cuda {
namespace {

using attention::Params;
using attention::Path;

absl::Status CheckHeadDim(int64_t head_dim) {
  if (head_dim <= attention::kMostPlainDim) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("attention on a GPU with heads of ", head_dim, " elements: wanted at most ",
                   attention::kMostPlainDim, "; use more heads or a smaller hidden size"));
}

// Not every GPU has a block's shared memory for the widest heads.
absl::Status CheckShared(int head_dim) {
  int device = 0, most = 0;
  ZS_RETURN_IF_ERROR(StatusOf(cudaGetDevice(&device), "cudaGetDevice"));
  ZS_RETURN_IF_ERROR(
      StatusOf(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute"));
  const int wanted = attention::PlainKeyGradientShared(head_dim);
  if (wanted <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("attention backward with heads of ", head_dim, " elements takes ", wanted,
                   " bytes of shared memory a block, this GPU has ", most,
                   "; use more heads or a smaller hidden size"));
}

absl::Status CheckBlocks(int64_t most, const char* what) {
  if (most <= std::numeric_limits<int32_t>::max()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " would be ", most, " blocks of a launch, wanted at most ",
                   std::numeric_limits<int32_t>::max(), "; use a smaller micro-batch"));
}

absl::Status Check(AttentionArgs args) {
  args.document_start = nullptr;  // memory that the host cannot read
  ZS_RETURN_IF_ERROR(cpu::CheckAttention(args));
  ZS_RETURN_IF_ERROR(CheckHeadDim(args.head_dim));
  // The kernel with the most blocks has one for four rows of a head.
  return CheckBlocks(attention::DeltaBlocks(attention::ParamsOf(args)), "attention");
}

}  // namespace

absl::Status AttentionForward(cudaStream_t stream, const AttentionArgs& args, void* out,
                              float* lse) {
  ZS_RETURN_IF_ERROR(Check(args));
  if (args.batch == 0 || args.seq == 0) return absl::OkStatus();
  Params p = attention::ParamsOf(args);
  p.out = out;
  p.lse = lse;
  const bool drops = attention::Drops(args.dropout);
  const Path path = attention::ChoosePath(args, {args.q, args.k, args.v, out});
  return StatusOf(path == Path::kTensorCores
                      ? attention::LaunchForward(stream, p, args.dtype,
                                                 attention::PaddedDim(args.head_dim), drops)
                      : attention::LaunchPlainForward(stream, p, args.dtype, drops),
                  "attention forward");
}

int64_t AttentionBackwardWorkspace(const AttentionArgs& args) {
  return args.batch * args.heads * args.seq * static_cast<int64_t>(sizeof(float));
}

absl::Status AttentionBackward(cudaStream_t stream, const AttentionArgs& args, const void* out,
                               const void* d_out, const float* lse, void* d_q, void* d_k, void* d_v,
                               void* workspace) {
  ZS_RETURN_IF_ERROR(Check(args));
  if (args.batch == 0 || args.seq == 0) return absl::OkStatus();
  Params p = attention::ParamsOf(args);
  p.out = const_cast<void*>(out);  // forward's results, which backward reads
  p.lse = const_cast<float*>(lse);
  p.d_out = d_out;
  p.delta = static_cast<float*>(workspace);
  p.d_q = d_q;
  p.d_k = d_k;
  p.d_v = d_v;
  const bool drops = attention::Drops(args.dropout);
  const Path path = attention::ChoosePath(args, {args.q, args.k, args.v, d_out, d_q, d_k, d_v});
  if (path == Path::kPlain) ZS_RETURN_IF_ERROR(CheckShared(p.head_dim));
  ZS_RETURN_IF_ERROR(
      StatusOf(attention::LaunchDelta(stream, p, args.dtype), "attention backward, row sums"));
  if (path == Path::kPlain) {
    ZS_RETURN_IF_ERROR(StatusOf(attention::LaunchPlainKeyGradient(stream, p, args.dtype, drops),
                                "attention backward of keys and values"));
    return StatusOf(attention::LaunchPlainQueryGradient(stream, p, args.dtype, drops),
                    "attention backward of queries");
  }
  const int dim = attention::PaddedDim(args.head_dim);
  ZS_RETURN_IF_ERROR(StatusOf(attention::LaunchKeyGradient(stream, p, args.dtype, dim, drops),
                              "attention backward of keys and values"));
  return StatusOf(attention::LaunchQueryGradient(stream, p, args.dtype, dim, drops),
                  "attention backward of queries");
}

absl::Status CachedAttention(cudaStream_t stream, const CachedAttentionArgs& args, void* out) {
  ZS_RETURN_IF_ERROR(cpu::CheckCachedAttention(args));
  ZS_RETURN_IF_ERROR(CheckHeadDim(args.head_dim));
  const attention::CachedParams p{.q = args.q,
                                  .k = args.k,
                                  .v = args.v,
                                  .out = out,
                                  .past = static_cast<int>(args.past),
                                  .rows = static_cast<int>(args.rows),
                                  .heads = static_cast<int>(args.heads),
                                  .kv_heads = static_cast<int>(args.kv_heads),
                                  .head_dim = static_cast<int>(args.head_dim),
                                  .scale = 1.0f / std::sqrt(static_cast<float>(args.head_dim))};
  ZS_RETURN_IF_ERROR(CheckBlocks(attention::CachedBlocks(p), "cached attention"));
  if (args.rows == 0) return absl::OkStatus();
  return StatusOf(attention::LaunchCached(stream, p, args.dtype), "cached attention");
}

}  // namespace zeroshard::cuda
