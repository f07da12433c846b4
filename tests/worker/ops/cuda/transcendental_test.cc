// Kernels with exponentials: within a bound of fp64 and of the CPU's. The GPU's own instructions
// (exp.h) are not those of the host; their bounds are part of the ones here.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/worker/ops/cuda/launch_emulation.h"
#include "worker/ops/cross_entropy_columns.h"
#include "worker/ops/cuda/activations.h"
#include "worker/ops/cuda/cross_entropy.h"
#include "worker/ops/cuda/exp.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard::cuda {
namespace {

using cpu::RandomValues;
using cpu::Values;

TEST(CudaExpTest, IsWithinItsBoundAndZeroFarOut) {
  double worst = 0;
  for (float x = 0; x >= -86; x -= 0.0007f) {
    const double wanted = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(ExpOfNegative(x) - wanted) / wanted);
  }
  EXPECT_LT(worst, 2e-7) << "with an exact power of two; the GPU's adds 2^-22.4";
  EXPECT_EQ(ExpOfNegative(0), 1.0f);
  EXPECT_EQ(ExpOfNegative(-0.0f), 1.0f);
  for (const float far : {-86.1f, -1e4f, -3e38f, -INFINITY, NAN, -NAN}) {
    EXPECT_EQ(ExpOfNegative(far), 0.0f) << far;
  }
}

// Half a unit of bf16, one of fp16, or a few of fp32.
double Bound(DType dtype) {
  if (dtype == DType::kF16) return 0x1p-10;
  return dtype == DType::kBF16 ? 0x1p-8 : 5e-7;
}

// |seen - wanted| <= bound * (|wanted| + floor) everywhere.
void ExpectRelativelyClose(const Values& seen, const Values& wanted, double bound, double floor) {
  ASSERT_EQ(seen.size(), wanted.size());
  for (size_t i = 0; i < seen.size(); ++i) {
    ASSERT_LE(std::abs(seen[i] - wanted[i]), bound * (std::abs(wanted[i]) + floor))
        << i << ": " << seen[i] << ", wanted " << wanted[i];
  }
}

TEST(CudaActivationsTest, GeluIsCloseToTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const int64_t n : {1, 9, 4000}) {
      for (const bool aligned : {false, true}) {
        Array<T> x(RandomValues(n, 1, 3)), dy(RandomValues(n, 2));
        Array<T> y(n), dx(n), wanted_y(n), wanted_dx(n);
        cpu::GeluForward(x.data(), n, dtype, wanted_y.data(), 1);
        cpu::GeluBackward(dy.data(), x.data(), n, dtype, wanted_dx.data(), 1);
        RunFlat(GeluOp<T>{x.data(), y.data()}, n, aligned);
        RunFlat(GeluGradOp<T>{dy.data(), x.data(), dx.data()}, n, aligned);
        ExpectRelativelyClose(y.values(), wanted_y.values(), Bound(dtype), 1e-3);
        ExpectRelativelyClose(dx.values(), wanted_dx.values(), Bound(dtype), 1);
        RunFlat(GeluOp<T>{x.data(), x.data()}, n, aligned);
        ExpectSameBits(x, y, "in place");
      }
    }
  });
}

TEST(CudaActivationsTest, SwiGluIsCloseToTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const int64_t n : {1, 9, 4000}) {
      for (const bool aligned : {false, true}) {
        Array<T> gate(RandomValues(n, 3, 3)), up(RandomValues(n, 4)), dy(RandomValues(n, 5));
        Array<T> y(n), d_gate(n), d_up(n), wanted(n), wanted_gate(n), wanted_up(n);
        cpu::SwiGluForward(gate.data(), up.data(), n, dtype, wanted.data(), 1);
        cpu::SwiGluBackward(dy.data(), gate.data(), up.data(), n, dtype, wanted_gate.data(),
                            wanted_up.data(), 1);
        RunFlat(SwiGluOp<T>{gate.data(), up.data(), y.data()}, n, aligned);
        RunFlat(SwiGluGradOp<T>{dy.data(), gate.data(), up.data(), d_gate.data(), d_up.data()}, n,
                aligned);
        ExpectRelativelyClose(y.values(), wanted.values(), Bound(dtype), 1e-3);
        ExpectRelativelyClose(d_gate.values(), wanted_gate.values(), Bound(dtype), 1);
        ExpectRelativelyClose(d_up.values(), wanted_up.values(), Bound(dtype), 1e-3);
        RunFlat(SwiGluGradOp<T>{dy.data(), gate.data(), up.data(), gate.data(), up.data()}, n,
                aligned);
        ExpectSameBits(gate, d_gate, "in place");
        ExpectSameBits(up, d_up, "in place");
      }
    }
  });
}

TEST(CudaActivationsTest, FarFromZeroTheSlopeIsOneOrZeroAndANanStays) {
  EXPECT_EQ(Gelu(1e4f), 1e4f);
  EXPECT_EQ(Gelu(-1e4f), 0.0f);
  EXPECT_EQ(GeluSlope(1e4f), 1.0f);
  EXPECT_EQ(GeluSlope(-1e15f), 0.0f);
  EXPECT_TRUE(std::isnan(Gelu(NAN)));
  EXPECT_TRUE(std::isnan(GeluSlope(NAN)));
}

// The three kernels in their order.
template <class T>
void RunCrossEntropy(T* logits, const int32_t* targets, int64_t rows, int64_t v,
                     float gradient_scale, bool aligned, float* losses) {
  const int64_t chunks = CeilDiv(v, kVocabularyChunk);
  std::vector<float> maxima(static_cast<size_t>(chunks * rows), NAN), sums = maxima;
  std::vector<float> column_maxima(static_cast<size_t>(rows), NAN), scales = column_maxima;
  const ChunkSums parts{maxima.data(), sums.data()};
  const ColumnScales columns{column_maxima.data(), scales.data()};
  RunEach(ChunkSumsOp<T>{logits, rows, v, parts}, chunks, rows, aligned);
  for (int64_t col = 0; col < rows; ++col) {
    OnlineSum total = JoinChunks(parts, rows, chunks, col, 0);
    for (int part = 1; part < kJoinParts; ++part)
      total = Join(total, JoinChunks(parts, rows, chunks, col, part));
    FinishLosses<T>{logits, targets, rows, losses, columns}(total, col);
  }
  if (gradient_scale == 0) return;
  RunEach(SoftmaxGradOp<T>{logits, targets, rows, v, gradient_scale, columns}, chunks, rows,
          aligned);
}

std::vector<int32_t> Targets(int64_t rows, int64_t v) {
  std::vector<int32_t> targets;
  for (int64_t r = 0; r < rows; ++r) {
    targets.push_back(r % 4 == 3 ? -1 : static_cast<int32_t>((r * 7919 + v - 1) % v));
  }
  return targets;
}

TEST(CudaCrossEntropyTest, LossesAndGradientsAreCloseToTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const int64_t rows : {1, 8, 37, 64}) {
      for (const int64_t v : {1, 5, 128, 129, 5000}) {
        for (const bool aligned : {false, true}) {
          if (aligned && rows % kPack != 0) continue;
          const auto targets = Targets(rows, v);
          Array<T> logits(RandomValues(rows * v, 6, 4)), wanted = logits, kept = logits;
          std::vector<float> losses(targets.size(), -1), losses_only = losses, wanted_losses;
          wanted_losses.resize(targets.size());
          cpu::CrossEntropyColumns(wanted.data(), targets.data(), rows, v, dtype, 0.5f,
                                   wanted_losses.data(), 1);
          RunCrossEntropy(kept.data(), targets.data(), rows, v, 0, aligned, losses_only.data());
          ExpectSameBits(kept, logits, "without the gradient the logits stay");
          RunCrossEntropy(logits.data(), targets.data(), rows, v, 0.5f, aligned, losses.data());
          EXPECT_EQ(losses, losses_only);
          for (size_t r = 0; r < losses.size(); ++r)
            ASSERT_NEAR(losses[r], wanted_losses[r], 2e-6 * (1 + wanted_losses[r]));
          // fp16's units are 2^-24 from 2^-14 down.
          const double floor = dtype == DType::kF16 ? 0x1p-14 : 1e-6;
          ExpectRelativelyClose(logits.values(), wanted.values(), Bound(dtype) + 1e-6, floor);
        }
      }
    }
  });
}

// The gradient's scale is the loss scale. Column r has one logit of r, its target's, and 63 of 0:
// its target's gradient, scaled by 2^17, fits in fp16 where the probability is above 1/2.
TEST(CudaCrossEntropyTest, WhatTheScaleLiftsOutOfFp16sRangeIsInfinityAsOnTheCpu) {
  const int64_t rows = 16, v = 64;
  const float scale = 0x1p17f;
  Values values(static_cast<size_t>(rows * v), 0.0);
  for (size_t r = 0; r < 16; ++r) values[7 * 16 + r] = static_cast<double>(r);
  Array<Fp16> logits(values), wanted = logits;
  const std::vector<int32_t> targets(16, 7);
  std::vector<float> losses(16), wanted_losses(16);
  cpu::CrossEntropyColumns(wanted.data(), targets.data(), rows, v, DType::kF16, scale,
                           wanted_losses.data(), 1);
  RunCrossEntropy(logits.data(), targets.data(), rows, v, scale, true, losses.data());
  const Values seen = logits.values(), expected = wanted.values();
  int infinite = 0;
  for (size_t r = 0; r < 16; ++r) {
    const double e = std::exp(static_cast<double>(r));
    const double of_target = (e / (e + 63) - 1) * 0x1p17;
    ASSERT_EQ(std::isinf(seen[7 * 16 + r]), of_target < -65520) << r;
    infinite += std::isinf(seen[7 * 16 + r]) ? 1 : 0;
    for (size_t i = 0; i < 64; ++i)
      ASSERT_EQ(std::isinf(seen[i * 16 + r]), std::isinf(expected[i * 16 + r])) << i << " " << r;
  }
  EXPECT_EQ(infinite, 5) << "e^4 / (e^4 + 63) is below 1/2, e^5 / (e^5 + 63) above";
}

TEST(CudaCrossEntropyTest, LossesAreThoseOfTheDefinition) {
  const int64_t rows = 5, v = 1000;
  const Values values = RandomValues(rows * v, 7, 5);
  Array<float> logits(values);
  const std::vector<int32_t> targets = {0, 999, 500, -1, 128};
  std::vector<float> losses(5);
  RunCrossEntropy(logits.data(), targets.data(), rows, v, 1, false, losses.data());
  for (size_t r = 0; r < 5; ++r) {
    double sum = 0;
    for (size_t i = 0; i < static_cast<size_t>(v); ++i) sum += std::exp(values[i * 5 + r]);
    const double wanted =
        targets[r] < 0 ? 0 : std::log(sum) - values[static_cast<size_t>(targets[r]) * 5 + r];
    EXPECT_NEAR(losses[r], wanted, 2e-6 * (1 + wanted));
  }
}

TEST(CudaCrossEntropyTest, ALogitThatIsNotFiniteSpoilsItsColumnAndNoOther) {
  const int64_t rows = 8, v = 300;
  for (const double bad :
       {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    for (const int64_t at : {0, 150, 299}) {
      for (const bool aligned : {false, true}) {
        Values values = RandomValues(rows * v, 8);
        values[static_cast<size_t>(at * rows + 4)] = bad;
        Array<float> logits(values);
        const std::vector<int32_t> targets(8, 0);
        std::vector<float> losses(8);
        RunCrossEntropy(logits.data(), targets.data(), rows, v, 1, aligned, losses.data());
        const Values gradient = logits.values();
        for (size_t i = 0; i < gradient.size(); ++i)
          ASSERT_EQ(std::isnan(gradient[i]), i % 8 == 4) << i;
        for (size_t r = 0; r < 8; ++r) EXPECT_EQ(std::isnan(losses[r]), r == 4);
      }
    }
  }
}

TEST(CudaCrossEntropyTest, LargeLogitsNeitherOverflowNorVanish) {
  const int64_t v = 400;
  Values values(static_cast<size_t>(v));
  for (size_t i = 0; i < values.size(); ++i) values[i] = i == 7 ? 300 : i == 390 ? 299 : -300;
  Array<float> logits(values);
  const int32_t target = 390;
  float loss = 0;
  RunCrossEntropy(logits.data(), &target, 1, v, 1, false, &loss);
  EXPECT_NEAR(loss, 1 + std::log1p(std::exp(-1.0)), 1e-6);
}

TEST(CudaAddLossesTest, AddsInOrderWhatHasATarget) {
  std::vector<float> losses = {1e8f, 1e-9f, 3.5f, NAN, -1e8f, 0.1f};
  const std::vector<int32_t> targets = {0, 4, 2, -1, 7, 1};
  double wanted = 0.25;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (targets[i] >= 0) wanted += static_cast<double>(losses[i]);
  }
  EXPECT_EQ(AddInOrder(losses.data(), targets.data(), 6, 0.25), wanted);
  EXPECT_EQ(AddInOrder(losses.data(), targets.data(), 0, 0.25), 0.25);
}

}  // namespace
}  // namespace zeroshard::cuda
