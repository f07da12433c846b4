// What the forward of two tensor ranks takes beyond its products and what it sends.
#pragma once

#include <cstdint>

#include "common/plan/model_table.h"
#include "common/types.h"

namespace zeroshard::bench {

struct TensorForward {
  double whole = 0;           // seconds of a micro-batch through all blocks, by one rank alone
  double whole_products = 0;  // of these in matrix products
  double split = 0;           // the same on two tensor ranks
  double split_products = 0;
  double sums = 0;  // as many all-reduces of as many elements, one right after the other
  double sum_bytes_a_second = 0;
  double sums_apart = 0;  // the same, as far apart as in the forward
  // Beyond products and sums that take `of_sums`, of the time.
  double Extra(double of_sums) const { return (split - split_products - of_sums) / split; }
  // Beyond half of what one rank takes, and sums: norms, residuals and the like are done twice.
  double BeyondHalf() const { return (split - whole / 2 - sums) / split; }
};

// Medians of `rounds`, all in turns.
TensorForward MeasureTensorForward(const ModelTable& model, int64_t micro_batch, DType type,
                                   int rounds);

}  // namespace zeroshard::bench
