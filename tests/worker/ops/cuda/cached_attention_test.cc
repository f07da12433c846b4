// The body of the cached attention kernel, run by an emulation of a block, against the definition.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/worker/ops/cuda/simt_emulator.h"
#include "tests/worker/ops/typed_values.h"
#include "worker/ops/cuda/cached_attention_block.h"

namespace zeroshard::cuda::attention {
namespace {

struct CachedShape {
  int past, rows, heads, kv_heads, dim;
};

std::vector<double> Define(const CachedShape& s, const TypedValues& q, const TypedValues& k,
                           const TypedValues& v) {
  std::vector<double> out(static_cast<size_t>(s.rows * s.heads * s.dim));
  for (int row = 0; row < s.rows; ++row) {
    for (int head = 0; head < s.heads; ++head) {
      const int at = (row * s.heads + head) * s.dim, kv = head / (s.heads / s.kv_heads);
      double sum = 0;
      for (int key = 0; key <= s.past + row; ++key) {
        const int at_key = (key * s.kv_heads + kv) * s.dim;
        double dot = 0;
        for (int d = 0; d < s.dim; ++d) dot += q[at + d] * k[at_key + d];
        const double weight = std::exp(dot / std::sqrt(static_cast<double>(s.dim)));
        sum += weight;
        for (int d = 0; d < s.dim; ++d) out[static_cast<size_t>(at + d)] += weight * v[at_key + d];
      }
      for (int d = 0; d < s.dim; ++d) out[static_cast<size_t>(at + d)] /= sum;
    }
  }
  return out;
}

class CudaCachedAttention : public testing::TestWithParam<CachedShape> {};

template <class T>
TypedValues Emulate(const CachedShape& s, const TypedValues& q, const TypedValues& k,
                    const TypedValues& v, uint32_t seed) {
  TypedValues out(q.count(), q.type());
  CachedParams p;
  p.q = q.data();
  p.k = k.data();
  p.v = v.data();
  p.out = out.data();
  p.past = s.past;
  p.rows = s.rows;
  p.heads = s.heads;
  p.kv_heads = s.kv_heads;
  p.head_dim = s.dim;
  p.scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
  BlockEmulator emulator(kThreads, static_cast<size_t>(CachedShared(s.dim)), seed);
  EXPECT_TRUE(emulator.Run(CachedBlocks(p), [&](const BlockEmulator::Simt& simt, void* shared) {
    CachedBlock<T>(simt, p, shared);
  })) << emulator.error();
  return out;
}

TEST_P(CudaCachedAttention, IsItsDefinitionAndTheSameInAnyOrderOfThreads) {
  const CachedShape s = GetParam();
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(NameOf(type));
    const auto q = TypedValues::Random(s.rows * s.heads * s.dim, type, 1, 2);
    const auto k = TypedValues::Random((s.past + s.rows) * s.kv_heads * s.dim, type, 2, 2);
    const auto v = TypedValues::Random((s.past + s.rows) * s.kv_heads * s.dim, type, 3);
    const auto run = [&](uint32_t seed) {
      return WithElement(
          type, [&](auto element) { return Emulate<decltype(element)>(s, q, k, v, seed); });
    };
    const TypedValues out = run(1);
    EXPECT_LT(RelativeError(out, Define(s, q, k, v)),
              type == DType::kF32 ? 1e-6 : 0.77 * RoundingOf(type));
    EXPECT_TRUE(run(2) == out);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaCachedAttention,
                         testing::Values(CachedShape{0, 1, 1, 1, 1}, CachedShape{0, 6, 4, 2, 40},
                                         CachedShape{100, 3, 2, 1, 128},
                                         CachedShape{37, 1, 3, 3, 256}));

}  // namespace
}  // namespace zeroshard::cuda::attention
