// The bodies of the attention kernels, run by an emulation of a block (simt_emulator.h), against
// the definition in fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/worker/ops/attention_trial.h"
#include "tests/worker/ops/cuda/simt_emulator.h"
#include "worker/ops/cuda/attention_backward.h"
#include "worker/ops/cuda/attention_forward.h"
#include "worker/ops/cuda/attention_plain.h"
#include "worker/ops/cuda/attention_plan.h"

namespace zeroshard::cuda::attention {
namespace {

// d qkv of sum(out * d_out) in fp64, by the chain rule.
std::vector<double> DefineGradient(const Shape& s, const std::vector<double>& qkv,
                                   const std::vector<double>& d_out) {
  const Views views(s);
  const Reference forward = Define(s, qkv);
  const double scale = 1 / std::sqrt(static_cast<double>(s.dim));
  std::vector<double> gradient(qkv.size());
  const auto index = [](int64_t i) { return static_cast<size_t>(i); };
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t kv = h / s.group();
      for (int64_t t = 0; t < s.seq; ++t) {
        const int64_t row = ((b * s.seq + t) * s.heads + h) * s.dim;
        const int64_t first = s.starts.empty() ? 0 : s.starts[index(b * s.seq + t)];
        double delta = 0;
        for (int64_t d = 0; d < s.dim; ++d) {
          delta += forward.out[index(row + d)] * d_out[index(row + d)];
        }
        for (int64_t u = first; u <= t; ++u) {
          double dot = 0, d_weight = 0;
          for (int64_t d = 0; d < s.dim; ++d) {
            dot += qkv[index(views.q.At(s, b, t, h, d))] * qkv[index(views.k.At(s, b, u, kv, d))];
            d_weight += d_out[index(row + d)] * qkv[index(views.v.At(s, b, u, kv, d))];
          }
          const double weight =
              std::exp(dot * scale - forward.lse[index((b * s.heads + h) * s.seq + t)]);
          const double factor =
              DropoutFactor(s.dropout, s.dropout.first_sample + b, (h * s.seq + t) * s.seq + u);
          const double d_score = weight * (d_weight * factor - delta) * scale;
          for (int64_t d = 0; d < s.dim; ++d) {
            const size_t q = index(views.q.At(s, b, t, h, d)),
                         k = index(views.k.At(s, b, u, kv, d));
            gradient[q] += d_score * qkv[k];
            gradient[k] += d_score * qkv[q];
            gradient[index(views.v.At(s, b, u, kv, d))] += weight * factor * d_out[index(row + d)];
          }
        }
      }
    }
  }
  return gradient;
}

// One trial through the emulated kernels.
class Emulated {
 public:
  Emulated(const Shape& shape, DType type, uint32_t seed) : trial(shape, type), seed_(seed) {
    trial.out = TypedValues::Random(trial.out.count(), type, 99);  // what was there must not matter
    trial.gradient = TypedValues::Random(trial.gradient.count(), type, 98);
    params_ = ParamsOf(trial.Args());
    params_.out = trial.out.data();
    params_.lse = trial.lse.data();
    params_.d_out = trial.d_out.data();
    delta_.resize(trial.lse.size());
    params_.delta = delta_.data();
    const Views views(shape);
    params_.d_q = Trial::At(trial.gradient, views.q);
    params_.d_k = Trial::At(trial.gradient, views.k);
    params_.d_v = Trial::At(trial.gradient, views.v);
  }

  Path path() const {
    const AttentionArgs args = trial.Args();
    return ChoosePath(args, {args.q, args.k, args.v, params_.out, params_.d_out, params_.d_q,
                             params_.d_k, params_.d_v});
  }
  void Run() {
    const bool drops = Drops(trial.shape.dropout);
    WithElement(trial.qkv.type(), [&](auto element) {
      using T = decltype(element);
      if (path() == Path::kPlain) return drops ? RunPlain<T, true>() : RunPlain<T, false>();
      if constexpr (sizeof(T) == 2) drops ? RunTiles<T, true>() : RunTiles<T, false>();
    });
  }
  int64_t bank_conflicts() const { return bank_conflicts_; }

  Trial trial;

 private:
  template <class Body>
  void Launch(int64_t blocks, int shared, const Body& body) {
    BlockEmulator emulator(kThreads, static_cast<size_t>(shared), seed_);
    EXPECT_TRUE(emulator.Run(blocks, body)) << emulator.error();
    bank_conflicts_ += emulator.bank_conflicts();
  }
  template <class T, bool kDrop>
  void RunTiles() {
    const int dim = PaddedDim(trial.shape.dim);
    if (dim == 32) RunTilesOf<T, 32, kDrop>();
    if (dim == 64) RunTilesOf<T, 64, kDrop>();
    if (dim == 128) RunTilesOf<T, 128, kDrop>();
  }
  template <class T, int D, bool kDrop>
  void RunTilesOf() {
    using Simt = BlockEmulator::Simt;
    Launch(QueryBlocks(params_, ForwardShape<D>::kQueries), ForwardShape<D>::kShared,
           [&](const Simt& simt, void* s) { ForwardBlock<T, D, kDrop>(simt, params_, s); });
    Launch(DeltaBlocks(params_), 0, [&](const Simt& simt, void*) { DeltaBlock<T>(simt, params_); });
    Launch(KeyBlocks(params_, kBackwardTile), KeyGradientShape<D>::kShared,
           [&](const Simt& simt, void* s) { KeyGradientBlock<T, D, kDrop>(simt, params_, s); });
    Launch(QueryBlocks(params_, kBackwardTile), QueryGradientShape<D>::kShared,
           [&](const Simt& simt, void* s) { QueryGradientBlock<T, D, kDrop>(simt, params_, s); });
  }
  template <class T, bool kDrop>
  void RunPlain() {
    using Simt = BlockEmulator::Simt;
    const int dim = params_.head_dim;
    Launch(QueryBlocks(params_, kPlainRows), PlainForwardShared(dim),
           [&](const Simt& simt, void* s) { PlainForwardBlock<T, kDrop>(simt, params_, s); });
    Launch(DeltaBlocks(params_), 0, [&](const Simt& simt, void*) { DeltaBlock<T>(simt, params_); });
    Launch(KeyBlocks(params_, kPlainRows), PlainKeyGradientShared(dim),
           [&](const Simt& simt, void* s) { PlainKeyGradientBlock<T, kDrop>(simt, params_, s); });
    Launch(QueryBlocks(params_, kPlainRows), PlainQueryGradientShared(dim),
           [&](const Simt& simt, void* s) { PlainQueryGradientBlock<T, kDrop>(simt, params_, s); });
  }

  uint32_t seed_;
  Params params_;
  std::vector<float> delta_;
  int64_t bank_conflicts_ = 0;
};

// Document starts [batch, seq] of documents of the given lengths, over and over; the first document
// of each next sequence is one token longer.
std::vector<int32_t> Starts(int64_t batch, int64_t seq, const std::vector<int64_t>& lengths) {
  std::vector<int32_t> starts;
  for (int64_t b = 0; b < batch; ++b) {
    size_t document = 0;
    int64_t start = 0, end = lengths[0] + b;
    for (int64_t t = 0; t < seq; ++t) {
      if (t == end) {
        start = end;
        end += lengths[++document % lengths.size()];
      }
      starts.push_back(static_cast<int32_t>(start));
    }
  }
  return starts;
}
// `first_element`: a tensor rank's, which has other heads before its own.
DropoutArgs Drop(float rate, int64_t first_element = 0) {
  return {.rate = rate,
          .seed = 0x123456789ABCDEF,
          .step = 77,
          .site = 5,
          .first_sample = 1000,
          .first_element = first_element};
}

class CudaAttention : public testing::TestWithParam<Shape> {
 protected:
  static void ExpectDefinition(const Emulated& run) {
    // A rounding of the type and what it leads to; fp32's is that of the sums.
    const DType type = run.trial.qkv.type();
    const double rounding = type == DType::kF32 ? 0 : RoundingOf(type);
    const std::vector<double> qkv = run.trial.qkv.AsDoubles(), d_out = run.trial.d_out.AsDoubles();
    const Shape& shape = run.trial.shape;
    const Reference wanted = Define(shape, qkv);
    EXPECT_LT(RelativeError(run.trial.out, wanted.out), 1.28 * rounding + 1e-6);
    for (size_t i = 0; i < wanted.lse.size(); ++i) {
      ASSERT_NEAR(run.trial.lse[i], wanted.lse[i], 1e-5 * (1 + std::abs(wanted.lse[i]))) << i;
    }
    EXPECT_LT(RelativeError(run.trial.gradient, DefineGradient(shape, qkv, d_out)),
              2.05 * rounding + 2e-6);
  }
};

TEST_P(CudaAttention, IsItsDefinitionAndTheSameInAnyOrderOfThreads) {
  for (const DType type : {DType::kBF16, DType::kF16, DType::kF32}) {
    SCOPED_TRACE(NameOf(type));
    Emulated run(GetParam(), type, 1);
    run.Run();
    ExpectDefinition(run);
    EXPECT_EQ(run.bank_conflicts(), 0);
    Emulated again(GetParam(), type, 2);
    again.Run();
    EXPECT_TRUE(again.trial.out == run.trial.out);
    EXPECT_EQ(again.trial.lse, run.trial.lse);
    EXPECT_TRUE(again.trial.gradient == run.trial.gradient);
  }
}

// Heads of 32, 64 and 128 and what is padded to them; sequences around the tiles of 16, 64 and 128.
INSTANTIATE_TEST_SUITE_P(TensorCores, CudaAttention,
                         testing::Values(Shape{1, 1, 1, 1, 8, true}, Shape{2, 65, 2, 2, 32, true},
                                         Shape{1, 200, 2, 1, 64, true},
                                         Shape{1, 128, 1, 1, 64, false},
                                         Shape{2, 70, 4, 2, 40, false},
                                         Shape{1, 131, 2, 1, 128, true},
                                         Shape{1, 63, 2, 2, 80, true}),
                         NameOfShape);
// Within a tile, across tiles, with tiles that nothing sees.
INSTANTIATE_TEST_SUITE_P(Documents, CudaAttention,
                         testing::Values(Shape{2, 300, 2, 1, 32, true,
                                               Starts(2, 300, {130, 5, 140})},
                                         Shape{1, 270, 1, 1, 64, false, Starts(1, 270, {10, 250})},
                                         Shape{2, 90, 2, 2, 128, true, Starts(2, 90, {3, 1, 40})}),
                         NameOfShape);
INSTANTIATE_TEST_SUITE_P(Dropout, CudaAttention,
                         testing::Values(Shape{2, 67, 2, 2, 32, true, {}, Drop(0.5f)},
                                         Shape{1, 131, 2, 1, 64, true, Starts(1, 131, {100, 20}),
                                               Drop(0.1f)},
                                         Shape{1, 66, 1, 1, 128, true, {}, Drop(0.3f)},
                                         Shape{1, 20, 1, 1, 16, true, {}, Drop(1.0f)},
                                         Shape{1, 67, 2, 2, 32, true, {}, Drop(0.4f, 2)}),
                         NameOfShape);
// What the tensor core kernels do not take.
INSTANTIATE_TEST_SUITE_P(
    Plain, CudaAttention,
    testing::Values(Shape{2, 35, 3, 3, 7, true}, Shape{1, 49, 2, 1, 136, false},
                    Shape{1, 70, 2, 2, 5, true, Starts(1, 70, {33, 9}), Drop(0.2f)},
                    Shape{1, 33, 2, 2, 5, true, {}, Drop(0.2f, 3)}),
    NameOfShape);

// Key 0 of one head is seen by all 16 queries: with gradients of 60000 its value's is 60000 times
// 1 + 1/2 + ... + 1/16, as all scores are equal; the last key's is 60000 / 16.
TEST(CudaAttentionOverflow, OfFp16IsInfinityWhereTheSumLeavesItsRange) {
  constexpr int64_t kSeq = 16;
  for (const int64_t dim : {7, 32}) {  // plain, tensor cores
    Emulated run({1, kSeq, 1, 1, dim, false}, DType::kF16, 1);
    for (int64_t i = 0; i < run.trial.qkv.count(); ++i) run.trial.qkv.Set(i, 0);
    for (int64_t i = 0; i < kSeq * dim; ++i) run.trial.d_out.Set(i, 60000);
    run.Run();
    const Views views(run.trial.shape);
    for (int64_t key = 0; key < kSeq; ++key) {
      double wanted = 0;
      for (int64_t query = key; query < kSeq; ++query)
        wanted += 60000 / static_cast<double>(query + 1);
      for (int64_t d = 0; d < dim; ++d) {
        const double seen = run.trial.gradient[views.v.At(run.trial.shape, 0, key, 0, d)];
        if (wanted > 65520) {
          ASSERT_EQ(seen, INFINITY) << key;
        } else {
          ASSERT_NEAR(seen, wanted, 2e-3 * wanted) << key;
        }
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard::cuda::attention
