// Rotary position embedding (Su et al. 2021, section 3.4.2), in the half-split layout.
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/types/span.h"
#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"
#include "worker/ops/vector_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/rope.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"

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
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    RotateTyped(As<T>(x), ld, begin, end, seq, heads, half, cosines, sines, sign);
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(RotateRows);

namespace {

// cosines and sines [positions, D/2] of position * frequencies[i].
struct RopeTable {
  std::vector<float> frequencies;
  int64_t positions = 0;
  std::vector<float> cosines, sines;
};

std::shared_ptr<const RopeTable> MakeTable(absl::Span<const float> frequencies, int64_t positions) {
  auto table = std::make_shared<RopeTable>();
  table->frequencies.assign(frequencies.begin(), frequencies.end());
  table->positions = positions;
  const size_t half = frequencies.size();
  table->cosines.resize(static_cast<size_t>(positions) * half);
  table->sines.resize(static_cast<size_t>(positions) * half);
  size_t at = 0;
  for (int64_t position = 0; position < positions; ++position) {
    for (size_t i = 0; i < half; ++i, ++at) {
      const auto angle = static_cast<double>(static_cast<float>(position) * frequencies[i]);
      table->cosines[at] = static_cast<float>(std::cos(angle));
      table->sines[at] = static_cast<float>(std::sin(angle));
    }
  }
  return table;
}

// The last few tables, newest first. A longer table serves fewer positions; one that proves too
// short is made anew for a power of two of them, so that a sequence that grows by one position at
// a time makes few. A table in use outlives its place here.
class RopeTables {
 public:
  std::shared_ptr<const RopeTable> Get(absl::Span<const float> frequencies, int64_t positions) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& table : tables_) {
        if (Serves(*table, frequencies, positions)) return table;
      }
    }
    // Unlocked: two threads may both make it.
    auto made = MakeTable(frequencies,
                          static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(positions))));
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(tables_, [&](const auto& table) {
      return table->positions <= made->positions && table->frequencies == made->frequencies;
    });
    if (tables_.size() >= kMaxTables) tables_.pop_back();
    tables_.insert(tables_.begin(), made);
    return made;
  }

 private:
  static constexpr size_t kMaxTables = 8;

  static bool Serves(const RopeTable& table, absl::Span<const float> frequencies,
                     int64_t positions) {
    return table.positions >= positions && absl::MakeConstSpan(table.frequencies) == frequencies;
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
          const float* frequencies, int64_t first_position, bool inverse, DType dtype,
          int threads) {
  AssertFloat(dtype);
  const int64_t half = head_dim / 2;
  const auto table =
      SharedTables().Get({frequencies, static_cast<size_t>(half)}, first_position + seq);
  const float sign = inverse ? -1.0f : 1.0f;
  ParallelRows(batch * seq, heads * head_dim, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(RotateRows)
    (x, ld, begin, end, seq, heads, half, table->cosines.data() + first_position * half,
     table->sines.data() + first_position * half, sign, dtype);
  });
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
