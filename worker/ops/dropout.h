// Dropout masks (Srivastava et al. 2014) from Philox. An element's fate depends on nothing but
// (seed, step, sample, site, element), so any rank, thread and micro-batch draws the same mask, and
// backward draws forward's again. Stateless after construction; thread-safe.
//
// Layout: the stream of (seed, step, sample, site) is the block Philox(counter = step's low and
// high word, sample's low and high word; key = seed). Element e takes word e % 4 of the block
//   Philox(counter = {low word of e / 4, high word of e / 4, stream[2] ^ site, stream[3]},
//          key = {stream[0], stream[1]})
// and is dropped where that word is below rate * 2^32.
#pragma once

#include <cstdint>

#include "common/kernels/philox.h"
#include "common/types.h"
#include "worker/ops/ops.h"

namespace zeroshard::cpu {

// The mask of one sample and site.
class DropoutMask {
 public:
  // rate in [0, 1]; with 1 everything is dropped.
  DropoutMask(const DropoutArgs& args, int64_t sample);

  // factors[i] = 0 or 1 / (1 - rate), of the call's elements [begin, begin + n). Any begin >= 0.
  void Factors(int64_t begin, int64_t n, float* factors) const;

 private:
  PhiloxKey key_;
  PhiloxCounter base_;  // all but the block
  int64_t first_;       // the mask's element that the call's first one is
  uint64_t threshold_;  // words below it are dropped
  float scale_;
};

// As Ops::Dropout. With rate 0, y = x.
void Dropout(const DropoutArgs& args, const void* x, int64_t batch, int64_t per_sample, DType dtype,
             void* y, int threads);

}  // namespace zeroshard::cpu
