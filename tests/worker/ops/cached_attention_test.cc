#include "worker/ops/cached_attention.h"

#include <gmock/gmock.h>

#include <string>

#include "tests/worker/ops/attention_trial.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

class CachedAttention : public testing::TestWithParam<Shape> {};

// The last `rows` positions of a sequence, as if those before were cached.
TypedValues LastRows(const Trial& trial, int64_t rows, int threads) {
  const Shape& s = trial.shape;
  const Views views(s);
  const int64_t past = s.seq - rows, width = s.heads * s.dim;
  const CachedAttentionArgs args{.q = Trial::At(trial.qkv, {views.q.base + past * width, width}),
                                 .k = Trial::At(trial.qkv, views.k),
                                 .v = Trial::At(trial.qkv, views.v),
                                 .past = past,
                                 .rows = rows,
                                 .heads = s.heads,
                                 .kv_heads = s.kv_heads,
                                 .head_dim = s.dim,
                                 .dtype = trial.qkv.type()};
  TypedValues out(rows * width, trial.qkv.type());
  const absl::Status status = MakeCpuOps(threads)->CachedAttention(args, out.data());
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

TEST_P(CachedAttention, IsAttentionOfTheLastRowsForAnyThreadCount) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(NameOf(type));
    const Trial trial(GetParam(), type);
    const std::vector<double> all = Define(trial.shape, trial.qkv.AsDoubles()).out;
    const int64_t width = trial.shape.heads * trial.shape.dim;
    for (const int64_t rows : {int64_t{1}, trial.shape.seq / 2 + 1, trial.shape.seq}) {
      const TypedValues out = LastRows(trial, rows, 1);
      const std::vector<double> wanted(all.end() - rows * width, all.end());
      EXPECT_LT(RelativeError(out, wanted), type != DType::kF32 ? 3e-3 : 1e-6) << rows;
      for (const int threads : {2, 4}) EXPECT_TRUE(LastRows(trial, rows, threads) == out);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CachedAttention,
                         testing::Values(Shape{1, 1, 1, 1, 1, false}, Shape{1, 7, 3, 1, 5, false},
                                         Shape{1, 130, 4, 2, 64, false},
                                         Shape{1, 300, 2, 2, 100, false}),
                         NameOfShape);

TEST(CachedAttentionTest, LargeScoresDoNotOverflow) {
  const Trial trial({1, 40, 1, 1, 8, false}, DType::kF32, 5, 200);
  EXPECT_LT(RelativeError(LastRows(trial, 40, 1), Define(trial.shape, trial.qkv.AsDoubles()).out),
            2e-2);
}

TEST(CachedAttentionTest, RefusesWhatCannotBe) {
  const auto ops = MakeCpuOps(1);
  const auto message = [&](auto change) {
    CachedAttentionArgs args{.past = 1, .rows = 1, .heads = 4, .kv_heads = 2, .head_dim = 8};
    change(&args);
    const absl::Status status = ops->CachedAttention(args, nullptr);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(message([](CachedAttentionArgs* a) { a->past = -1; }), HasSubstr("negative"));
  EXPECT_THAT(message([](CachedAttentionArgs* a) { a->kv_heads = 3; }), HasSubstr("multiple"));
  EXPECT_THAT(message([](CachedAttentionArgs* a) { a->kv_heads = 0; }), HasSubstr("key head"));
  EXPECT_THAT(message([](CachedAttentionArgs* a) { a->dtype = DType::kI32; }), HasSubstr("int32"));
}

}  // namespace
}  // namespace zeroshard
