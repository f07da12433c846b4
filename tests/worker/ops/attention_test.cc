#include "worker/ops/attention.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/ops/typed_values.h"
#include "worker/ops/ops.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

struct Shape {
  int64_t batch, seq, heads, kv_heads, dim;
  bool packed;  // q, k and v side by side in one buffer

  int64_t group() const { return heads / kv_heads; }
  int64_t rows() const { return batch * seq; }
};

std::string NameOfShape(const testing::TestParamInfo<Shape>& info) {
  const Shape& s = info.param;
  return "B" + std::to_string(s.batch) + "T" + std::to_string(s.seq) + "H" +
         std::to_string(s.heads) + "KV" + std::to_string(s.kv_heads) + "D" + std::to_string(s.dim) +
         (s.packed ? "Packed" : "Apart");
}

// Where the elements of q, k or v lie.
struct View {
  int64_t base, ld;
  int64_t At(const Shape& s, int64_t b, int64_t t, int64_t head, int64_t d) const {
    return base + (b * s.seq + t) * ld + head * s.dim + d;
  }
};
struct Views {
  explicit Views(const Shape& s) {
    const int64_t q_cols = s.heads * s.dim, kv_cols = s.kv_heads * s.dim;
    if (s.packed) {
      const int64_t ld = q_cols + 2 * kv_cols;
      q = {0, ld}, k = {q_cols, ld}, v = {q_cols + kv_cols, ld};
      count = s.rows() * ld;
    } else {
      q = {0, q_cols}, k = {s.rows() * q_cols, kv_cols};
      v = {s.rows() * (q_cols + kv_cols), kv_cols};
      count = s.rows() * (q_cols + 2 * kv_cols);
    }
  }
  View q, k, v;
  int64_t count;
};

// Attention by its definition in fp64: out [B*T, H*D], lse [B, H, T].
struct Reference {
  std::vector<double> out, lse;
};
Reference Define(const Shape& s, const std::vector<double>& qkv) {
  const Views views(s);
  Reference r{std::vector<double>(static_cast<size_t>(s.rows() * s.heads * s.dim)),
              std::vector<double>(static_cast<size_t>(s.rows() * s.heads))};
  const auto at = [&qkv](int64_t i) { return qkv[static_cast<size_t>(i)]; };
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      for (int64_t t = 0; t < s.seq; ++t) {
        std::vector<double> weight(static_cast<size_t>(t) + 1);
        double most = -std::numeric_limits<double>::infinity(), sum = 0;
        for (int64_t u = 0; u <= t; ++u) {
          double dot = 0;
          for (int64_t d = 0; d < s.dim; ++d) {
            dot += at(views.q.At(s, b, t, h, d)) * at(views.k.At(s, b, u, h / s.group(), d));
          }
          weight[static_cast<size_t>(u)] = dot / std::sqrt(static_cast<double>(s.dim));
          most = std::max(most, weight[static_cast<size_t>(u)]);
        }
        for (double& w : weight) sum += (w = std::exp(w - most));
        for (int64_t d = 0; d < s.dim; ++d) {
          double value = 0;
          for (int64_t u = 0; u <= t; ++u) {
            value += weight[static_cast<size_t>(u)] * at(views.v.At(s, b, u, h / s.group(), d));
          }
          r.out[static_cast<size_t>(((b * s.seq + t) * s.heads + h) * s.dim + d)] = value / sum;
        }
        r.lse[static_cast<size_t>((b * s.heads + h) * s.seq + t)] = most + std::log(sum);
      }
    }
  }
  return r;
}

// What the loss sum(out * d_out) is, and its gradient by the analytic formula in fp64.
double Loss(const Shape& s, const std::vector<double>& qkv, const std::vector<double>& d_out) {
  const Reference r = Define(s, qkv);
  double loss = 0;
  for (size_t i = 0; i < d_out.size(); ++i) loss += r.out[i] * d_out[i];
  return loss;
}

struct Trial {
  Trial(const Shape& s, DType type, uint32_t seed = 7, float range = 2)
      : shape(s),
        qkv(TypedValues::Random(Views(s).count, type, seed, range)),
        d_out(TypedValues::Random(s.rows() * s.heads * s.dim, type, seed + 1)),
        out(s.rows() * s.heads * s.dim, type),
        lse(static_cast<size_t>(s.rows() * s.heads)),
        gradient(Views(s).count, type) {}

  AttentionArgs Args() const {
    const Views views(shape);
    return {.q = At(qkv, views.q),
            .k = At(qkv, views.k),
            .v = At(qkv, views.v),
            .ld_q = views.q.ld,
            .ld_k = views.k.ld,
            .ld_v = views.v.ld,
            .batch = shape.batch,
            .seq = shape.seq,
            .heads = shape.heads,
            .kv_heads = shape.kv_heads,
            .head_dim = shape.dim,
            .dtype = qkv.type()};
  }
  static void* At(const TypedValues& values, const View& view) {
    return const_cast<char*>(static_cast<const char*>(values.data())) +
           view.base * static_cast<int64_t>(SizeOf(values.type()));
  }

  void Forward(Ops* ops) {
    const absl::Status status = ops->AttentionForward(Args(), out.data(), lse.data());
    ASSERT_TRUE(status.ok()) << status;
  }
  void Backward(Ops* ops) {
    const Views views(shape);
    const absl::Status status =
        ops->AttentionBackward(Args(), out.data(), d_out.data(), lse.data(), At(gradient, views.q),
                               At(gradient, views.k), At(gradient, views.v));
    ASSERT_TRUE(status.ok()) << status;
  }

  Shape shape;
  TypedValues qkv, d_out, out;
  std::vector<float> lse;
  TypedValues gradient;
};

class Attention : public testing::TestWithParam<Shape> {};

TEST_P(Attention, ForwardIsItsDefinition) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(NameOf(type));
    Trial run(GetParam(), type);
    run.Forward(MakeCpuOps(1).get());
    const Reference wanted = Define(run.shape, run.qkv.AsDoubles());
    const bool bf16 = type == DType::kBF16;
    EXPECT_LT(RelativeError(run.out, wanted.out), bf16 ? 5e-3 : 1e-6);
    for (size_t i = 0; i < wanted.lse.size(); ++i) {
      // bf16 operands are exact in the products, the scores and their sum are fp32.
      ASSERT_NEAR(run.lse[i], wanted.lse[i], 1e-5 * (1 + std::abs(wanted.lse[i]))) << i;
    }
  }
}

// Directional central differences in fp64: along q alone, k alone, v alone, and single elements.
TEST_P(Attention, BackwardIsTheDerivativeOfTheForward) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(NameOf(type));
    Trial run(GetParam(), type);
    const auto ops = MakeCpuOps(1);
    run.Forward(ops.get());
    run.Backward(ops.get());
    const std::vector<double> at = run.qkv.AsDoubles(), d_out = run.d_out.AsDoubles();
    const Views views(run.shape);
    const bool bf16 = type == DType::kBF16;
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
      EXPECT_NEAR(got, wanted, (bf16 ? 4e-3 : 1e-6) * norm * std::sqrt(length) + 1e-6);
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
  for (const DType type : {DType::kF32, DType::kBF16}) {
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
  for (const DType type : {DType::kF32, DType::kBF16}) {
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
  for (const DType type : {DType::kF32, DType::kBF16}) {
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
}

}  // namespace
}  // namespace zeroshard
