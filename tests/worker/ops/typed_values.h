// Values of a test in fp32, bf16 or fp16 memory, with their exact values in fp64 beside them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "common/types.h"

namespace zeroshard {

class TypedValues {
 public:
  TypedValues(int64_t count, DType type)
      : count_(count), type_(type), bytes_(static_cast<size_t>(count) * SizeOf(type)) {}

  // Uniform in [-range, range], rounded to the type.
  static TypedValues Random(int64_t count, DType type, uint32_t seed, float range = 1) {
    TypedValues values(count, type);
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> uniform(-range, range);
    for (int64_t i = 0; i < count; ++i) values.Set(i, uniform(generator));
    return values;
  }

  // 16 bits are cut off, not rounded: the value is then exact, and this code is not that under
  // test.
  void Set(int64_t i, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (type_ == DType::kBF16) {
      const auto high = static_cast<uint16_t>(bits >> 16);
      std::memcpy(&bytes_[static_cast<size_t>(i) * 2], &high, 2);
    } else if (type_ == DType::kF16) {
      bits &= 0xFFFFE000u;
      std::memcpy(&value, &bits, 4);
      const auto half = static_cast<Half>(value);
      std::memcpy(&bytes_[static_cast<size_t>(i) * 2], &half, 2);
    } else {
      std::memcpy(&bytes_[static_cast<size_t>(i) * 4], &bits, 4);
    }
  }

  double operator[](int64_t i) const {
    uint32_t bits = 0;
    if (type_ == DType::kF16) {
      Half half;
      std::memcpy(&half, &bytes_[static_cast<size_t>(i) * 2], 2);
      return static_cast<double>(static_cast<float>(half));
    }
    if (type_ == DType::kBF16) {
      uint16_t high;
      std::memcpy(&high, &bytes_[static_cast<size_t>(i) * 2], 2);
      bits = uint32_t{high} << 16;
    } else {
      std::memcpy(&bits, &bytes_[static_cast<size_t>(i) * 4], 4);
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  std::vector<double> AsDoubles() const {
    std::vector<double> values(static_cast<size_t>(count_));
    for (int64_t i = 0; i < count_; ++i) values[static_cast<size_t>(i)] = (*this)[i];
    return values;
  }

  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  int64_t count() const { return count_; }
  DType type() const { return type_; }
  bool operator==(const TypedValues& other) const { return bytes_ == other.bytes_; }

 private:
  __extension__ typedef _Float16 Half;  // with the compiler's conversions

  int64_t count_;
  DType type_;
  std::vector<char> bytes_;
};

// Half a unit in the last place, relatively.
inline double RoundingOf(DType type) {
  if (type == DType::kF16) return 0x1p-11;
  return type == DType::kBF16 ? 0x1p-8 : 0x1p-24;
}

// ||got - wanted|| / ||wanted||
template <typename Got>
double RelativeError(const Got& got, const std::vector<double>& wanted) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double difference = got[static_cast<int64_t>(i)] - wanted[i];
    error += difference * difference;
    norm += wanted[i] * wanted[i];
  }
  return std::sqrt(error / std::max(norm, 1e-300));
}

}  // namespace zeroshard
