#include "worker/ops/dropout.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/worker/ops/dropout_reference.h"
#include "tests/worker/ops/vector_test_util.h"

namespace zeroshard::cpu {
namespace {

DropoutArgs Args(float rate) {
  return {.rate = rate, .seed = 0xFEDCBA9876543210, .step = 3, .site = 2, .first_sample = 41};
}

Values Dropped(const DropoutArgs& args, const Values& x, int64_t batch, DType dtype = DType::kF32,
               int threads = 1, int skip = 0) {
  const auto per_sample = static_cast<int64_t>(x.size()) / batch;
  Tensor in(dtype, x, skip), out(dtype, batch * per_sample, skip);
  Dropout(args, in.data(), batch, per_sample, dtype, out.data(), threads);
  return out.values();
}

TEST(DropoutTest, EveryElementMeetsTheFateThatItsCounterGives) {
  for (const float rate : {0.1f, 0.5f, 0.9f}) {
    for (const int64_t per_sample : {1, 3, 64, 130, 2049}) {
      const int64_t batch = 3;
      const DropoutArgs args = Args(rate);
      const Values x = RandomValues(batch * per_sample, 5), y = Dropped(args, x, batch);
      for (int64_t i = 0; i < batch * per_sample; ++i) {
        const auto at = static_cast<size_t>(i);
        const double factor =
            DropoutFactor(args, args.first_sample + i / per_sample, i % per_sample);
        ASSERT_EQ(y[at], static_cast<float>(x[at] * factor)) << i;
      }
    }
  }
}

// Also where the block's number passes 32 bits.
TEST(DropoutTest, ARangeOfAMaskCanBeDrawnFromAnyElement) {
  const DropoutArgs args = Args(0.3f);
  const DropoutMask mask(args, 7);
  for (const int64_t begin :
       {int64_t{0}, int64_t{1}, int64_t{6}, int64_t{131}, (int64_t{1} << 34) - 29}) {
    for (const int64_t n : {1, 2, 5, 64, 67, 200}) {
      std::vector<float> factors(static_cast<size_t>(n) + 1, -1.0f);
      mask.Factors(begin, n, factors.data());
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(factors[static_cast<size_t>(i)], DropoutFactor(args, 7, begin + i))
            << begin << " + " << i;
      }
      ASSERT_EQ(factors.back(), -1.0f) << "written past the end";
    }
  }
}

TEST(DropoutTest, KeepsItsShareAndTheMean) {
  constexpr int64_t kCount = 200000;
  for (const float rate : {0.05f, 0.1f, 0.5f}) {
    const Values y = Dropped(Args(rate), Values(kCount, 1.0), 1);
    double kept = 0, sum = 0;
    for (const double value : y) kept += value != 0, sum += value;
    const double deviation = std::sqrt(rate * (1 - rate) / kCount);
    EXPECT_NEAR(kept / kCount, 1 - rate, 5 * deviation);
    EXPECT_NEAR(sum / kCount, 1, 5 * deviation / (1 - rate));
  }
}

// Two masks that share nothing agree on half of the elements at rate 1/2.
TEST(DropoutTest, SeedStepSampleAndSiteEachMakeAnotherMask) {
  constexpr int64_t kCount = 100000;
  const auto draw = [](const DropoutArgs& args, int64_t sample) {
    std::vector<float> factors(kCount);
    DropoutMask(args, sample).Factors(0, kCount, factors.data());
    return factors;
  };
  const DropoutArgs args = Args(0.5f);
  const std::vector<float> base = draw(args, 41);
  DropoutArgs seed = args, high_seed = args, step = args, site = args;
  seed.seed += 1;
  high_seed.seed += uint64_t{1} << 32;
  step.step += 1;
  site.site += 1;
  const std::vector<std::vector<float>> others = {draw(seed, 41), draw(high_seed, 41),
                                                  draw(step, 41), draw(site, 41), draw(args, 42)};
  for (const std::vector<float>& other : others) {
    double same = 0;
    for (size_t i = 0; i < base.size(); ++i) same += base[i] == other[i];
    EXPECT_NEAR(same / kCount, 0.5, 5 * 0.5 / std::sqrt(kCount));
  }
}

TEST(DropoutTest, RateZeroIsACopyAndRateOneIsNothing) {
  const Values x = RandomValues(100, 3);
  EXPECT_EQ(Dropped(Args(0), x, 2), x);
  for (const double value : Dropped(Args(1), x, 2)) EXPECT_EQ(value, 0);
}

TEST(DropoutTest, MayBeDoneInPlace) {
  const Values x = RandomValues(3000, 3);
  Tensor inout(DType::kF32, x);
  Dropout(Args(0.2f), inout.data(), 3, 1000, DType::kF32, inout.data(), 1);
  EXPECT_EQ(inout.values(), Dropped(Args(0.2f), x, 3));
}

// Whole vectors begin at multiples of four elements.
TEST(DropoutTest, APartHasTheMaskOfTheWhole) {
  constexpr int64_t kSamples = 2, kPerSample = 5000;
  const Values ones(kSamples * kPerSample, 1.0);
  const Values whole = Dropped(Args(0.3f), ones, kSamples);
  for (const auto& [first, size] :
       {std::pair<int64_t, int64_t>{0, 100}, {3, 200}, {1024, 512}, {4999, 1}}) {
    DropoutArgs args = Args(0.3f);
    args.first_element = first;
    const Values part = Dropped(args, Values(static_cast<size_t>(kSamples * size), 1.0), kSamples);
    for (int64_t s = 0; s < kSamples; ++s) {
      for (int64_t i = 0; i < size; ++i) {
        ASSERT_EQ(part[static_cast<size_t>(s * size + i)],
                  whole[static_cast<size_t>(s * kPerSample + first + i)])
            << first << " " << i;
      }
    }
  }
}

TEST(DropoutTest, SameBitsForThreadsAlignmentInstructionsAndRoundedOnceToBf16) {
  const Values x = RandomValues(3 * 33333, 1);
  ExpectReproducible([&](DType dtype, int threads, int skip) -> std::vector<Output> {
    return {{Dropped(Args(0.1f), x, 3, dtype, threads, skip)}};
  });
}

}  // namespace
}  // namespace zeroshard::cpu
