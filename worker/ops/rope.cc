// Rotary position embedding (Su et al. 2021, section 3.4.2), in the half-split layout.
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "worker/ops/parallel.h"
#include "worker/ops/pointers.h"
#include "worker/ops/simd_targets.h"
#include "worker/ops/vector_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/rope.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "worker/ops/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

template <class T>
HWY_INLINE void RotateTyped(T* x, int64_t ld, int64_t begin, int64_t end, int64_t seq,
                            int64_t heads, int64_t half, const float* cosines, const float* sines,
                            float sign) {
  for (int64_t row = begin; row < end; ++row) {
    const float* cosine = cosines + (row % seq) * half;
    const float* sine = sines + (row % seq) * half;
    for (int64_t head = 0; head < heads; ++head) {
      T* first = x + row * ld + head * 2 * half;
      T* second = first + half;
      ForEach(half, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
        const V c = LoadN(cosine + i, n);
        const V s = hn::Mul(LoadN(sine + i, n), Set(sign));
        const V a = LoadN(first + i, n);
        const V b = LoadN(second + i, n);
        StoreN(Fma(a, c, hn::Neg(hn::Mul(b, s))), first + i, n);
        StoreN(Fma(b, c, hn::Mul(a, s)), second + i, n);
      });
    }
  }
}

void RotateRows(void* x, int64_t ld, int64_t begin, int64_t end, int64_t seq, int64_t heads,
                int64_t half, const float* cosines, const float* sines, float sign, DType dtype) {
  if (dtype == DType::kBF16) {
    RotateTyped(As<Bf16>(x), ld, begin, end, seq, heads, half, cosines, sines, sign);
  } else {
    RotateTyped(As<float>(x), ld, begin, end, seq, heads, half, cosines, sines, sign);
  }
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(RotateRows);

namespace {

// cosines and sines [seq, head_dim / 2] of position * theta^(-2i / head_dim).
struct RopeTable {
  float theta = 0;
  int64_t head_dim = 0;
  int64_t seq = 0;
  std::vector<float> cosines, sines;
};

std::shared_ptr<const RopeTable> MakeTable(float theta, int64_t head_dim, int64_t seq) {
  auto table = std::make_shared<RopeTable>();
  table->theta = theta;
  table->head_dim = head_dim;
  table->seq = seq;
  const int64_t half = head_dim / 2;
  table->cosines.resize(static_cast<size_t>(seq * half));
  table->sines.resize(static_cast<size_t>(seq * half));
  for (int64_t i = 0; i < half; ++i) {
    const double frequency = std::pow(
        static_cast<double>(theta), -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
    for (int64_t position = 0; position < seq; ++position) {
      const double angle = static_cast<double>(position) * frequency;
      const size_t at = static_cast<size_t>(position * half + i);
      table->cosines[at] = static_cast<float>(std::cos(angle));
      table->sines[at] = static_cast<float>(std::sin(angle));
    }
  }
  return table;
}

// The last few tables, newest first. A longer sequence's table serves a shorter one. A table in use
// outlives its place here.
class RopeTables {
 public:
  std::shared_ptr<const RopeTable> Get(float theta, int64_t head_dim, int64_t seq) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& table : tables_) {
        if (Serves(*table, theta, head_dim, seq)) return table;
      }
    }
    auto made = MakeTable(theta, head_dim, seq);  // unlocked: two threads may both make it
    const std::lock_guard<std::mutex> lock(mutex_);
    if (tables_.size() >= kMaxTables) tables_.pop_back();
    tables_.insert(tables_.begin(), made);
    return made;
  }

 private:
  static constexpr size_t kMaxTables = 8;

  static bool Serves(const RopeTable& table, float theta, int64_t head_dim, int64_t seq) {
    return table.theta == theta && table.head_dim == head_dim && table.seq >= seq;
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<const RopeTable>> tables_;
};

RopeTables& SharedTables() {
  static RopeTables tables;
  return tables;
}

}  // namespace

void Rope(void* x, int64_t ld, int64_t batch, int64_t seq, int64_t heads, int64_t head_dim,
          float theta, bool inverse, DType dtype, int threads) {
  AssertFloat(dtype);
  const auto table = SharedTables().Get(theta, head_dim, seq);
  const float sign = inverse ? -1.0f : 1.0f;
  ParallelRows(batch * seq, heads * head_dim, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(RotateRows)
    (x, ld, begin, end, seq, heads, head_dim / 2, table->cosines.data(), table->sines.data(), sign,
     dtype);
  });
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
