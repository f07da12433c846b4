// The arithmetic of Dropout.
#pragma once

#include <cstdint>

#include "worker/ops/cuda/dropout_mask.h"
#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

// Row = sample. y may be x. Packs only where the call's first element begins a block of the mask.
template <class T>
struct DropoutOp {
  DropoutRule rule;
  int64_t first_sample, per_sample;
  const T* x;
  T* y;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t row, const Cols& mine) const {
    const DropoutStream stream = DropoutStreamOf(rule, static_cast<uint64_t>(first_sample + row));
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      const uint64_t element = rule.first_element + static_cast<uint64_t>(col);
      float v[N];
      Load<N>(x + row * per_sample + col, v);
      if constexpr (N == 1) {
        v[0] *= DropoutFactor(rule, stream, element);
      } else {
        for (int block = 0; block < N / 4; ++block) {
          float factors[4];
          DropoutFactors(rule, stream, element / 4 + static_cast<uint64_t>(block), factors);
          for (int i = 0; i < 4; ++i) v[4 * block + i] *= factors[i];
        }
      }
      Store<N>(v, y + row * per_sample + col);
    });
  }
};

}  // namespace zeroshard::cuda
