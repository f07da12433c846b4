// Runs the kernels of worker/ops/cuda/each.h on the host: every thread of a launch, the last one
// first, so that whoever relied on an order would be caught.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/worker/ops/vector_test_util.h"
#include "worker/ops/cuda/each.h"

namespace zeroshard::cuda {

template <bool kAligned, class F>
void RunPlan(const F& f, int64_t rows, int64_t cols, const EachPlan& plan) {
  for (int64_t block_y = plan.blocks_y; block_y-- > 0;) {
    for (int64_t block_x = plan.blocks_x; block_x-- > 0;) {
      for (int y = plan.threads_y; y-- > 0;) {
        for (int x = plan.threads_x; x-- > 0;) {
          EachOfThread<kAligned>(f, rows, cols, plan, block_x, block_y, x, y);
        }
      }
    }
  }
}

template <class F>
void RunEach(const F& f, int64_t rows, int64_t cols, bool aligned, int64_t packs_a_thread = 1) {
  if (rows <= 0 || cols <= 0) return;
  const EachPlan plan = PlanEach(rows, cols, aligned, packs_a_thread);
  aligned ? RunPlan<true>(f, rows, cols, plan) : RunPlan<false>(f, rows, cols, plan);
}

template <class F>
void RunFlat(const F& f, int64_t n, bool aligned) {
  RunEach(Flat<F>{f}, 1, n, aligned);
}

// Calls f(T(), dtype) for each element type.
template <class F>
void ForEachType(const F& f) {
  f(float(), DType::kF32);
  f(Bf16(), DType::kBF16);
  f(Fp16(), DType::kF16);
}

// `count` typed elements, whose bits can be compared.
template <class T>
class Array {
 public:
  explicit Array(int64_t count) : elements_(static_cast<size_t>(count)) {}
  explicit Array(const cpu::Values& values) {
    for (const double value : values)
      elements_.push_back(Element<T>::Narrow(static_cast<float>(value)));
  }

  T* data() { return elements_.data(); }
  cpu::Values values() const {
    cpu::Values values;
    for (const T& element : elements_) values.push_back(Element<T>::Widen(element));
    return values;
  }

  friend void ExpectSameBits(const Array& seen, const Array& wanted, const std::string& what) {
    ASSERT_EQ(seen.elements_.size(), wanted.elements_.size()) << what;
    for (size_t i = 0; i < seen.elements_.size(); ++i) {
      ASSERT_EQ(std::memcmp(&seen.elements_[i], &wanted.elements_[i], sizeof(T)), 0)
          << what << " at " << i << ": " << Element<T>::Widen(seen.elements_[i]) << ", wanted "
          << Element<T>::Widen(wanted.elements_[i]);
    }
  }

 private:
  std::vector<T> elements_;
};

}  // namespace zeroshard::cuda
