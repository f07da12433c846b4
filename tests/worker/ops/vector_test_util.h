// What the tests of the vector kernels share: typed tensors at odd addresses, another bf16
// rounding, numerical gradients, and the checks that every kernel has to pass.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "common/kernels/simd_targets.h"
#include "common/types.h"
// After it:
#include "hwy/highway.h"
#include "hwy/targets.h"

namespace zeroshard::cpu {

using Values = std::vector<double>;

// The nearest bf16 (8 significant bits, exponents of fp32), ties to the even one; by scaling.
inline double RoundToBf16(double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent = 0;
  std::frexp(value, &exponent);
  const int last_bit = std::max(exponent, -125) - 8;
  return std::ldexp(std::nearbyint(std::ldexp(value, -last_bit)), last_bit);
}

// The nearest fp16 (11 significant bits), ties to the even one, or infinity; by scaling.
inline double RoundToFp16(double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent = 0;
  std::frexp(value, &exponent);
  const int last_bit = std::max(exponent, -13) - 11;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -last_bit)), last_bit);
  return std::abs(rounded) < 65536 ? rounded : std::copysign(INFINITY, value);
}

inline double RoundTo(DType dtype, double value) {
  if (dtype == DType::kBF16) return RoundToBf16(value);
  return dtype == DType::kF16 ? RoundToFp16(value) : value;
}

// The compiler's own conversions, which those under test have nothing to do with.
__extension__ typedef _Float16 CompilersHalf;
inline uint16_t HalfBits(float value) {
  const auto half = static_cast<CompilersHalf>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline float HalfValue(uint16_t bits) {
  CompilersHalf half;
  std::memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}

// A tensor of fp32, bf16 or fp16 that begins `skip` elements after an aligned address.
class Tensor {
 public:
  Tensor(DType dtype, const Values& values, int skip = 0)
      : dtype_(dtype), size_(values.size()), skip_(static_cast<size_t>(skip)) {
    bytes_.resize((size_ + skip_) * SizeOf(dtype_) + 1);
    for (size_t i = 0; i < size_; ++i) Set(i, values[i]);
  }
  // Filled with a value that a kernel has to overwrite.
  Tensor(DType dtype, int64_t size, int skip = 0)
      : Tensor(dtype, Values(static_cast<size_t>(size), 777.0), skip) {}

  void* data() { return bytes_.data() + skip_ * SizeOf(dtype_); }
  const void* data() const { return bytes_.data() + skip_ * SizeOf(dtype_); }
  float* floats() { return static_cast<float*>(data()); }

  Values values() const {
    Values values(size_);
    for (size_t i = 0; i < size_; ++i) values[i] = Get(i);
    return values;
  }

 private:
  void Set(size_t i, double value) {
    const float narrowed = static_cast<float>(RoundTo(dtype_, value));
    uint32_t bits;
    std::memcpy(&bits, &narrowed, 4);
    if (dtype_ == DType::kBF16) bits >>= 16;  // the low half is zero
    if (dtype_ == DType::kF16) bits = HalfBits(narrowed);
    std::memcpy(bytes_.data() + (skip_ + i) * SizeOf(dtype_), &bits, SizeOf(dtype_));
  }
  double Get(size_t i) const {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes_.data() + (skip_ + i) * SizeOf(dtype_), SizeOf(dtype_));
    if (dtype_ == DType::kBF16) bits <<= 16;
    if (dtype_ == DType::kF16) return HalfValue(static_cast<uint16_t>(bits));
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  DType dtype_;
  size_t size_, skip_;
  std::vector<uint8_t> bytes_;
};

// Normal deviates that bf16 and fp16 hold exactly.
inline Values RandomValues(int64_t size, uint32_t seed, double scale = 1, double mean = 0) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(mean, scale);
  Values values(static_cast<size_t>(size));
  for (double& value : values) value = RoundToFp16(RoundToBf16(normal(generator)));
  return values;
}

inline double Largest(const Values& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

// |actual - expected| <= tolerance * the largest expected magnitude, everywhere.
inline void ExpectClose(const Values& actual, const Values& expected, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  const double bound = tolerance * Largest(expected);
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_LE(std::abs(actual[i] - expected[i]), bound)
        << what << " at " << i << ": " << actual[i] << ", expected " << expected[i];
  }
}

inline double Dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Central differences.
inline Values NumericalGradient(const std::function<double(const Values&)>& f, Values x) {
  Values gradient(x.size());
  constexpr double kStep = 1e-5;
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + kStep;
    const double above = f(x);
    x[i] = at - kStep;
    const double below = f(x);
    x[i] = at;
    gradient[i] = (above - below) / (2 * kStep);
  }
  return gradient;
}

// Runs `body` once for each instruction set that this machine and the kernels have.
inline void ForEachTarget(const std::function<void(const std::string&)>& body) {
  const int64_t native = hwy::SupportedTargets();
  for (const int64_t target :
       {int64_t{HWY_AVX3}, int64_t{HWY_AVX2}, int64_t{HWY_NEON}, int64_t{HWY_EMU128}}) {
    if (target != HWY_EMU128 && (native & target) == 0) continue;
    hwy::GetChosenTarget().Update(target);
    body(hwy::TargetName(target));
  }
  hwy::GetChosenTarget().Update(native);
}

// A kernel's results for given inputs; `typed` ones are of the tensor type, the rest always fp32.
struct Output {
  Values values;
  bool typed = true;
};
using Kernel = std::function<std::vector<Output>(DType dtype, int threads, int skip)>;

inline void ExpectSame(const std::vector<Output>& actual, const std::vector<Output>& expected,
                       const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t k = 0; k < actual.size(); ++k) {
    ASSERT_EQ(actual[k].values.size(), expected[k].values.size()) << what;
    for (size_t i = 0; i < actual[k].values.size(); ++i) {
      ASSERT_EQ(actual[k].values[i], expected[k].values[i])
          << what << ", output " << k << " at " << i;
    }
  }
}

// What must hold for every kernel: the same bits for any thread count, alignment and instruction
// set, and 16-bit results that are the fp32 ones (of the same inputs) rounded once.
inline void ExpectReproducible(const Kernel& kernel) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const auto expected = kernel(dtype, 1, 0);
    for (const int threads : {2, 3}) {
      ExpectSame(kernel(dtype, threads, 0), expected, "threads: " + std::to_string(threads));
    }
    for (const int skip : {1, 3}) {
      ExpectSame(kernel(dtype, 1, skip), expected, "skipped elements: " + std::to_string(skip));
    }
    ForEachTarget(
        [&](const std::string& target) { ExpectSame(kernel(dtype, 1, 0), expected, target); });
  }
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    auto rounded = kernel(DType::kF32, 1, 0);
    for (Output& output : rounded) {
      if (!output.typed) continue;
      for (double& value : output.values) value = RoundTo(dtype, value);
    }
    ExpectSame(kernel(dtype, 1, 0), rounded, std::string(NameOf(dtype)) + " against rounded fp32");
  }
}

// Around vector lengths, and one that several threads share.
inline const std::vector<int64_t> kSizes = {1, 7, 63, 64, 65, 1000, 50001};

}  // namespace zeroshard::cpu
