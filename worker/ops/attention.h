// Causal attention in tiles of 128 queries by 128 keys (Dao et al. 2022, "FlashAttention"): scores
// exist a tile at a time, tiles that the mask empties (causal, or by documents) are skipped, the
// backward recomputes them from the log-sum-exp of each row, and dropout's mask from its counters.
// A task is one sample and query head (forward) or one sample and key head with all its query
// heads, in order (backward), so the bits do not depend on the threads. With native bf16 products,
// scores are fp32 and weights and their gradients are rounded to bf16 before the next product;
// without, and of fp16, operands are widened and everything is fp32.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "worker/ops/ops.h"
#include "worker/ops/product.h"

namespace zeroshard::cpu {

// INVALID_ARGUMENT names the size, leading dimension, type, document start or rate that cannot be.
absl::Status CheckAttention(const AttentionArgs& args);

// As Ops::AttentionForward and AttentionBackward, for checked arguments. contexts: one for each
// thread, at least `threads`. Throw what oneDNN throws.
void AttentionForward(const AttentionArgs& args, void* out, float* lse, int threads,
                      std::vector<ProductContext>* contexts);
void AttentionBackward(const AttentionArgs& args, const void* out, const void* d_out,
                       const float* lse, void* d_q, void* d_k, void* d_v, int threads,
                       std::vector<ProductContext>* contexts);

}  // namespace zeroshard::cpu
