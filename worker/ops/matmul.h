// Ops::Matmul on the CPU (architecture, section 11).
//
// Where oneDNN has its brgemm kernels for the operands as they are, one call computes the whole
// product on all threads; its bits do not depend on their number (tested). Elsewhere C is cut into
// blocks of 128 x 256, each computed by one thread with single-threaded calls over panels of 1,024
// of k, whose fp32 sum is rounded once: fixed blocks, so again the same bits for any number of
// threads. fp16 operands, and bf16 ones without native products, are widened to fp32 panel by
// panel.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "worker/ops/ops.h"
#include "worker/ops/product.h"

namespace zeroshard::cpu {

// INVALID_ARGUMENT names the argument that is negative, null, too large or of a type not supported.
absl::Status CheckMatmul(const MatmulArgs& args);

// How a product is computed; for tests and benchmarks.
enum class MatmulPath { kWhole, kBlocks };
MatmulPath ChoosePath(const MatmulArgs& args, int threads, ProductContext* context);

// contexts: one for each thread, at least `threads`. Throws what oneDNN throws.
void Matmul(const MatmulArgs& args, int threads, std::vector<ProductContext>* contexts);

}  // namespace zeroshard::cpu
