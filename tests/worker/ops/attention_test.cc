#include "worker/ops/attention.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/ops/attention_trial.h"
#include "worker/ops/ops.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

class Attention : public testing::TestWithParam<Shape> {};

TEST_P(Attention, ForwardIsItsDefinition) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(NameOf(type));
    Trial run(GetParam(), type);
    run.Forward(MakeCpuOps(1).get());
    const Reference wanted = Define(run.shape, run.qkv.AsDoubles());
    const bool narrow = type != DType::kF32;
    EXPECT_LT(RelativeError(run.out, wanted.out), narrow ? 5e-3 : 1e-6);
    for (size_t i = 0; i < wanted.lse.size(); ++i) {
      // bf16 operands are exact in the products, the scores and their sum are fp32.
      ASSERT_NEAR(run.lse[i], wanted.lse[i], 1e-5 * (1 + std::abs(wanted.lse[i]))) << i;
    }
  }
}

// Directional central differences in fp64: along q alone, k alone, v alone, and single elements.
TEST_P(Attention, BackwardIsTheDerivativeOfTheForward) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(NameOf(type));
    Trial run(GetParam(), type);
    const auto ops = MakeCpuOps(1);
    run.Forward(ops.get());
    run.Backward(ops.get());
    const std::vector<double> at = run.qkv.AsDoubles(), d_out = run.d_out.AsDoubles();
    const Views views(run.shape);
    const bool narrow = type != DType::kF32;
    double norm = 0;
    for (int64_t i = 0; i < views.count; ++i) norm += run.gradient[i] * run.gradient[i];
    norm = std::sqrt(norm);
    std::mt19937 generator(3);
    const auto expect = [&](const std::vector<double>& direction) {
      double length = 0, got = 0;
      for (size_t i = 0; i < direction.size(); ++i) {
        length += direction[i] * direction[i];
        got += direction[i] * run.gradient[static_cast<int64_t>(i)];
      }
      constexpr double kStep = 1e-5;
      std::vector<double> up = at, down = at;
      for (size_t i = 0; i < direction.size(); ++i) {
        up[i] += kStep * direction[i];
        down[i] -= kStep * direction[i];
      }
      const double wanted =
          (Loss(run.shape, up, d_out) - Loss(run.shape, down, d_out)) / (2 * kStep);
      EXPECT_NEAR(got, wanted, (narrow ? 4e-3 : 1e-6) * norm * std::sqrt(length) + 1e-6);
    };
    for (const auto& [view, heads] :
         {std::pair{views.q, run.shape.heads}, std::pair{views.k, run.shape.kv_heads},
          std::pair{views.v, run.shape.kv_heads}}) {
      std::vector<double> direction(at.size(), 0.0);
      for (int64_t b = 0; b < run.shape.batch; ++b) {
        for (int64_t t = 0; t < run.shape.seq; ++t) {
          for (int64_t h = 0; h < heads; ++h) {
            for (int64_t d = 0; d < run.shape.dim; ++d) {
              direction[static_cast<size_t>(view.At(run.shape, b, t, h, d))] =
                  static_cast<double>(generator() % 1000) / 500.0 - 1.0;
            }
          }
        }
      }
      expect(direction);
    }
    for (int i = 0; i < 6; ++i) {
      std::vector<double> direction(at.size(), 0.0);
      direction[generator() % at.size()] = 1;
      expect(direction);
    }
  }
}

TEST_P(Attention, HasTheSameBitsForAnyThreadCount) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    Trial one(GetParam(), type);
    const auto ops = MakeCpuOps(1);
    one.Forward(ops.get());
    one.Backward(ops.get());
    for (const int threads : {2, 3, 4}) {
      Trial many(GetParam(), type);
      const auto team = MakeCpuOps(threads);
      many.Forward(team.get());
      many.Backward(team.get());
      EXPECT_TRUE(many.out == one.out) << threads;
      EXPECT_EQ(many.lse, one.lse) << threads;
      EXPECT_TRUE(many.gradient == one.gradient) << threads;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Attention,
                         testing::Values(Shape{1, 1, 1, 1, 1, true}, Shape{2, 5, 3, 3, 7, true},
                                         Shape{1, 128, 2, 2, 32, true},
                                         Shape{1, 129, 2, 1, 16, true},
                                         Shape{2, 130, 4, 2, 9, false},
                                         Shape{1, 300, 3, 1, 8, true}),
                         NameOfShape);

// Document starts [batch, seq] of documents of the given lengths, the same in each sequence but for
// the first document, which is one token longer in each next one.
std::vector<int32_t> Starts(int64_t batch, int64_t seq, const std::vector<int64_t>& lengths) {
  std::vector<int32_t> starts;
  for (int64_t b = 0; b < batch; ++b) {
    int64_t document = 0, start = 0, end = lengths[0] + b;
    for (int64_t t = 0; t < seq; ++t) {
      if (t == end) {
        start = end;
        ++document;
        end += lengths[static_cast<size_t>(document) % lengths.size()];
      }
      starts.push_back(static_cast<int32_t>(start));
    }
  }
  return starts;
}

DropoutArgs Drop(float rate) {
  return {.rate = rate, .seed = 0x123456789ABCDEF, .step = 77, .site = 5, .first_sample = 1000};
}

// Within a tile, across tiles, empty tiles between, documents of one token, and dropout with
// elements that begin nowhere near a multiple of four.
INSTANTIATE_TEST_SUITE_P(Documents, Attention,
                         testing::Values(Shape{2, 9, 2, 1, 4, true, Starts(2, 9, {3, 1, 1, 4})},
                                         Shape{2, 300, 2, 1, 8, true,
                                               Starts(2, 300, {130, 5, 140})},
                                         Shape{1, 420, 1, 1, 8, false, Starts(1, 420, {10, 380})}),
                         NameOfShape);
INSTANTIATE_TEST_SUITE_P(Dropout, Attention,
                         testing::Values(Shape{2, 9, 3, 1, 4, true, {}, Drop(0.1f)},
                                         Shape{2, 131, 2, 2, 8, true, {}, Drop(0.5f)},
                                         Shape{2, 259, 2, 1, 8, false,
                                               Starts(2, 259, {100, 31, 90}), Drop(0.3f)}),
                         NameOfShape);

TEST(AttentionTest, DocumentsThatAllStartAtZeroChangeNoBit) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Shape shape{2, 150, 2, 1, 8, true};
    Shape zeros = shape;
    zeros.starts.assign(static_cast<size_t>(shape.rows()), 0);
    Trial plain(shape, type), masked(zeros, type);
    const auto ops = MakeCpuOps(1);
    for (Trial* trial : {&plain, &masked}) {
      trial->Forward(ops.get());
      trial->Backward(ops.get());
    }
    EXPECT_TRUE(plain.out == masked.out);
    EXPECT_EQ(plain.lse, masked.lse);
    EXPECT_TRUE(plain.gradient == masked.gradient);
  }
}

TEST(AttentionTest, ADocumentSeesNothingOfItsNeighbours) {
  const Shape shape{1, 300, 2, 2, 16, true, Starts(1, 300, {131, 100, 69})};
  Trial before(shape, DType::kF32), after(shape, DType::kF32);
  const Views views(shape);
  // All of the first and third document changes; d_out stays.
  for (int64_t i = 0; i < views.count; ++i) {
    const int64_t t = i / views.q.ld;
    if (t < 131 || t >= 231) after.qkv.Set(i, static_cast<float>(i % 7) * 10);
  }
  const auto ops = MakeCpuOps(1);
  for (Trial* trial : {&before, &after}) {
    trial->Forward(ops.get());
    trial->Backward(ops.get());
  }
  for (int64_t t = 131; t < 231; ++t) {
    for (int64_t i = 0; i < views.q.ld; ++i) {
      ASSERT_EQ(before.gradient[t * views.q.ld + i], after.gradient[t * views.q.ld + i]) << t;
    }
    for (int64_t i = 0; i < shape.heads * shape.dim; ++i) {
      const int64_t at = t * shape.heads * shape.dim + i;
      ASSERT_EQ(before.out[at], after.out[at]) << t;
    }
  }
}

TEST(AttentionTest, DropoutLeavesTheLogSumExpAlone) {
  const Shape shape{1, 140, 2, 1, 8, true};
  Shape dropping = shape;
  dropping.dropout = Drop(0.4f);
  Trial plain(shape, DType::kF32), dropped(dropping, DType::kF32);
  const auto ops = MakeCpuOps(1);
  plain.Forward(ops.get());
  dropped.Forward(ops.get());
  EXPECT_EQ(plain.lse, dropped.lse);
  EXPECT_FALSE(plain.out == dropped.out);
}

// Sequence 1 of a batch that starts at sample 1000 is sequence 0 of one that starts at 1001.
TEST(AttentionTest, TheMaskBelongsToTheSampleNotToItsPlaceInTheBatch) {
  const int64_t seq = 133;
  Trial two({2, seq, 2, 2, 8, true, {}, Drop(0.4f)}, DType::kF32);
  Shape second = two.shape;
  second.batch = 1;
  second.dropout.first_sample += 1;
  Trial one(second, DType::kF32);
  const int64_t elements = Views(second).count;
  for (int64_t i = 0; i < elements; ++i) {
    one.qkv.Set(i, static_cast<float>(two.qkv[elements + i]));
  }
  const auto ops = MakeCpuOps(1);
  one.Forward(ops.get());
  two.Forward(ops.get());
  for (int64_t i = 0; i < one.out.count(); ++i) {
    ASSERT_EQ(one.out[i], two.out[one.out.count() + i]) << i;
  }
}

TEST(AttentionTest, PositionsSeeNothingAfterThem) {
  const Shape shape{1, 200, 2, 2, 16, true};
  Trial before(shape, DType::kF32), after(shape, DType::kF32);
  constexpr int64_t kFrom = 131;
  const Views views(shape);
  for (int64_t i = kFrom * views.q.ld; i < views.count; ++i) after.qkv.Set(i, 1000);
  const auto ops = MakeCpuOps(1);
  before.Forward(ops.get());
  after.Forward(ops.get());
  for (int64_t i = 0; i < kFrom * shape.heads * shape.dim; ++i) {
    ASSERT_EQ(before.out[i], after.out[i]) << i;
  }
}

TEST(AttentionTest, LargeScoresDoNotOverflow) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    Trial run({1, 140, 1, 1, 8, true}, type, 5, 200);
    const auto ops = MakeCpuOps(1);
    run.Forward(ops.get());
    run.Backward(ops.get());
    const Reference wanted = Define(run.shape, run.qkv.AsDoubles());
    // Scores reach 1e5, where fp32 has steps of 2^-7.
    EXPECT_LT(RelativeError(run.out, wanted.out), 2e-2);
    for (int64_t i = 0; i < run.gradient.count(); ++i) {
      ASSERT_TRUE(std::isfinite(run.gradient[i])) << i;
    }
  }
}

TEST(AttentionTest, NanIsSeenWhereItIsReadAndNowhereElse) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Shape shape{1, 10, 1, 1, 4, true};
    Trial run(shape, type);
    run.qkv.Set(Views(shape).k.At(shape, 0, 6, 0, 1), std::numeric_limits<float>::quiet_NaN());
    run.Forward(MakeCpuOps(1).get());
    for (int64_t t = 0; t < shape.seq; ++t) {
      EXPECT_EQ(std::isnan(run.out[t * shape.dim]), t >= 6) << t;
      EXPECT_EQ(std::isnan(run.lse[static_cast<size_t>(t)]), t >= 6) << t;
    }
  }
}

TEST(AttentionTest, EmptyBatchIsNothing) {
  Trial run({0, 4, 1, 1, 4, true}, DType::kF32);
  const auto ops = MakeCpuOps(2);
  run.Forward(ops.get());
  run.Backward(ops.get());
}

TEST(AttentionTest, RefusesWhatCannotBe) {
  const auto ops = MakeCpuOps(1);
  const AttentionArgs good = Trial({1, 4, 4, 2, 8, true}, DType::kF32).Args();
  const auto message = [&](auto change) {
    AttentionArgs args = good;
    change(&args);
    const absl::Status status = ops->AttentionForward(args, nullptr, nullptr);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(message([](AttentionArgs* a) { a->kv_heads = 3; }), HasSubstr("multiple"));
  EXPECT_THAT(message([](AttentionArgs* a) { a->head_dim = 0; }), HasSubstr("dimension"));
  EXPECT_THAT(message([](AttentionArgs* a) { a->seq = -1; }), HasSubstr("negative"));
  EXPECT_THAT(message([](AttentionArgs* a) { a->ld_q = 31; }), HasSubstr("ld_q is 31"));
  EXPECT_THAT(message([](AttentionArgs* a) { a->ld_v = 15; }), HasSubstr("15"));
  EXPECT_THAT(message([](AttentionArgs* a) { a->dtype = DType::kU8; }), HasSubstr("uint8"));
  EXPECT_THAT(message([](AttentionArgs* a) { a->dropout.rate = 1.5f; }), HasSubstr("1.5"));
  const std::vector<int32_t> ahead = {0, 2, 2, 2}, falling = {0, 1, 0, 3};
  EXPECT_THAT(message([&](AttentionArgs* a) { a->document_start = ahead.data(); }),
              HasSubstr("position 1 is 2, wanted 0 to 1"));
  EXPECT_THAT(message([&](AttentionArgs* a) { a->document_start = falling.data(); }),
              HasSubstr("position 2 is 0, wanted 1 to 2"));
}

}  // namespace
}  // namespace zeroshard
