// Attention of a few queries over the keys and values that a cache holds: generation. A task is one
// query and head; its sums run in an order that no thread count changes.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "worker/ops/ops.h"
#include "worker/ops/product.h"

namespace zeroshard::cpu {

// INVALID_ARGUMENT names the size or type that cannot be.
absl::Status CheckCachedAttention(const CachedAttentionArgs& args);

// As Ops::CachedAttention, for checked arguments. contexts: one for each thread, at least
// `threads`. Throws std::bad_alloc.
void CachedAttention(const CachedAttentionArgs& args, void* out, int threads,
                     std::vector<ProductContext>* contexts);

}  // namespace zeroshard::cpu
