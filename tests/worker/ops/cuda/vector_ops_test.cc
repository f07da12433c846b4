// Kernels without sums over elements: the same bits as the CPU's.
#include "worker/ops/vector_ops.h"

#include <gtest/gtest.h>

#include <numeric>
#include <utility>

#include "common/kernels/adamw.h"
#include "common/kernels/convert.h"
#include "tests/worker/ops/cuda/launch_emulation.h"
#include "worker/ops/cuda/adamw.h"
#include "worker/ops/cuda/dropout.h"
#include "worker/ops/cuda/elementwise.h"
#include "worker/ops/cuda/embedding.h"
#include "worker/ops/cuda/rope.h"
#include "worker/ops/dropout.h"

namespace zeroshard::cuda {
namespace {

using cpu::RandomValues;
using cpu::Values;

// Normal deviates of fp32, and what is not finite.
Values Mixed(int64_t n, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Values values(static_cast<size_t>(n));
  for (double& value : values) value = normal(generator);
  if (n > 20) {
    values[3] = INFINITY;
    values[11] = -INFINITY;
    values[17] = NAN;
    values[19] = -0.0;
  }
  return values;
}

const std::vector<int64_t> kSizes = {1, 7, 8, 65, 1000, 5003};

TEST(CudaVectorOpsTest, AddIsTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const int64_t n : kSizes) {
      for (const bool aligned : {false, true}) {
        Array<T> a(Mixed(n, 1)), b(RandomValues(n, 2)), wanted(n), y(n);
        cpu::Add(a.data(), b.data(), n, dtype, wanted.data(), 1);
        RunFlat(AddOp<T>{a.data(), b.data(), y.data()}, n, aligned);
        ExpectSameBits(y, wanted, "sums");
        RunFlat(AddOp<T>{a.data(), b.data(), a.data()}, n, aligned);
        ExpectSameBits(a, wanted, "in place");
      }
    }
  });
}

TEST(CudaVectorOpsTest, ConvertIsTheCpusForAllTypes) {
  ForEachType([](auto from_element, DType from) {
    ForEachType([&](auto to_element, DType to) {
      for (const int64_t n : kSizes) {
        for (const bool aligned : {false, true}) {
          using From = decltype(from_element);
          using To = decltype(to_element);
          Array<From> in(Mixed(n, 3));
          Array<To> out(n), wanted(n);
          cpu::Convert(in.data(), from, n, wanted.data(), to, 1);
          RunFlat(ConvertOp<From, To>{in.data(), out.data()}, n, aligned);
          ExpectSameBits(out, wanted, NameOf(to));
        }
      }
    });
  });
}

// NaNs as well: against the CPU's vectors and, where it is a number, the compiler's conversion.
TEST(CudaFp16Test, EveryHalfWidensAsOnTheCpu) {
  std::vector<Fp16> halves;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) halves.push_back({static_cast<uint16_t>(bits)});
  std::vector<float> wanted(halves.size()), seen(halves.size());
  const auto n = static_cast<int64_t>(halves.size());
  cpu::Convert(halves.data(), DType::kF16, n, wanted.data(), DType::kF32, 1);
  RunFlat(ConvertOp<Fp16, float>{halves.data(), seen.data()}, n, true);
  for (size_t i = 0; i < halves.size(); ++i) {
    ASSERT_EQ(BitsOf(seen[i]), BitsOf(wanted[i])) << i;
    const float compilers = cpu::HalfValue(halves[i].bits);
    if (std::isnan(compilers)) continue;
    ASSERT_EQ(BitsOf(seen[i]), BitsOf(compilers)) << i;
    ASSERT_EQ(BitsOf(Rounded(seen[i], DType::kF16)), BitsOf(seen[i])) << i;
  }
}

// Of every two neighbours, 65504 and the number 2^16 that fp16 has not among them: the middle and
// the numbers beside it, of both signs.
TEST(CudaFp16Test, EveryBorderOfRoundingIsTheCpus) {
  std::vector<float> values = {NAN, INFINITY, 0x1p-149f, 3.4e38f};
  for (uint16_t bits = 0; bits < 0x7C00; ++bits) {
    const float low = cpu::HalfValue(bits);
    const float high = bits == 0x7BFF ? 65536.0f : cpu::HalfValue(static_cast<uint16_t>(bits + 1));
    const float middle = low + (high - low) / 2;
    for (const float value : {low, std::nextafter(low, high), std::nextafter(middle, low), middle,
                              std::nextafter(middle, high), std::nextafter(high, low)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  const auto n = static_cast<int64_t>(values.size());
  std::vector<Fp16> wanted(values.size()), seen(values.size());
  cpu::Convert(values.data(), DType::kF32, n, wanted.data(), DType::kF16, 1);
  RunFlat(ConvertOp<float, Fp16>{values.data(), seen.data()}, n, true);
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(seen[i].bits, wanted[i].bits) << values[i];
    if (std::isnan(values[i])) continue;
    ASSERT_EQ(seen[i].bits, cpu::HalfBits(values[i])) << values[i];
  }
  EXPECT_EQ(Element<Fp16>::Narrow(65519.996f).bits, 0x7BFF);
  EXPECT_EQ(Element<Fp16>::Narrow(65520.0f).bits, 0x7C00);
}

TEST(CudaVectorOpsTest, AccumulateF32IsTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const int64_t n : kSizes) {
      for (const bool aligned : {false, true}) {
        Array<T> x(Mixed(n, 4));
        Array<float> acc(RandomValues(n, 5, 0.001)), wanted = acc;
        cpu::AccumulateF32(x.data(), dtype, n, true, wanted.data(), 1);
        RunFlat(AccumulateOp<T>{x.data(), acc.data()}, n, aligned);
        ExpectSameBits(acc, wanted, "sums");
      }
    }
  });
}

TEST(CudaVectorOpsTest, RoundInPlaceIsTheCpus) {
  for (const DType wire : {DType::kBF16, DType::kF16}) {
    for (const int64_t n : kSizes) {
      for (const bool aligned : {false, true}) {
        Array<float> x(Mixed(n, 6)), wanted = x;
        cpu::RoundInPlace(wanted.data(), n, wire, 1);
        RunFlat(RoundOp{x.data(), wire}, n, aligned);
        ExpectSameBits(x, wanted, NameOf(wire));
      }
    }
  }
}

TEST(CudaVectorOpsTest, AddRoundedIsTheCpusForAllTypes) {
  ForEachType([](auto sum_element, DType sum_type) {
    ForEachType([&](auto gradient_element, DType gradient_type) {
      for (const DType wire : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const int64_t n : kSizes) {
          for (const bool aligned : {false, true}) {
            using S = decltype(sum_element);
            using G = decltype(gradient_element);
            Array<S> sum(Mixed(n, 7));
            Array<G> gradient(Mixed(n, 8)), wanted = gradient;
            cpu::AddRounded(sum.data(), sum_type, n, wire, wanted.data(), gradient_type, 1);
            RunFlat(AddRoundedOp<S, G>{sum.data(), wire, gradient.data()}, n, aligned);
            ExpectSameBits(gradient, wanted, NameOf(wire));
          }
        }
      }
    });
  });
}

TEST(CudaVectorOpsTest, AdamWIsTheCpusForAllTypesOverSteps) {
  ForEachType([](auto grad_element, DType grad_type) {
    ForEachType([&](auto param_element, DType param_type) {
      using G = decltype(grad_element);
      using P = decltype(param_element);
      for (const int64_t n : kSizes) {
        for (const bool aligned : {false, true}) {
          Array<float> master(RandomValues(n, 9)), m(n), v(n);
          Array<float> master2 = master, m2 = m, v2 = v;
          Array<P> param(n), param2(n);
          AdamWArgs args{.learning_rate = 3e-3f, .weight_decay = 0.1f, .grad_scale = 0.37f};
          for (args.t = 1; args.t <= 3; ++args.t) {
            Array<G> grad(Mixed(n, static_cast<uint32_t>(args.t)));
            cpu::AdamW(args, n, grad.data(), grad_type, master2.data(), m2.data(), v2.data(),
                       param2.data(), param_type, 1);
            RunFlat(AdamWOp<G, P>{AdamWFactorsOf(args), grad.data(), master.data(), m.data(),
                                  v.data(), param.data()},
                    n, aligned);
          }
          ExpectSameBits(master, master2, "master");
          ExpectSameBits(m, m2, "exp_avg");
          ExpectSameBits(v, v2, "exp_avg_sq");
          ExpectSameBits(param, param2, "param");
        }
      }
    });
  });
}

TEST(CudaVectorOpsTest, StochasticRoundingIsTheCpus) {
  for (const int64_t n : kSizes) {
    for (const bool aligned : {false, true}) {
      Array<float> master(Mixed(n, 9)), m(n), v(n), master2 = master, m2 = m, v2 = v;
      Array<float> grad(RandomValues(n, 10));
      Array<Bf16> param(n), param2(n);
      AdamWArgs args{.learning_rate = 3e-3f};
      args.rounding.stochastic = true;
      args.rounding.seed = uint64_t{77} << 32 | 5;
      args.rounding = args.rounding.At(3, (int64_t{1} << 32) - 64);
      cpu::AdamW(args, n, grad.data(), DType::kF32, master2.data(), m2.data(), v2.data(),
                 param2.data(), DType::kBF16, 1);
      RunFlat(
          AdamWOp<float, Bf16>{AdamWFactorsOf(args), grad.data(), master.data(), m.data(), v.data(),
                               param.data(), args.rounding, RoundingKey(args.rounding)},
          n, aligned);
      ExpectSameBits(param, param2, "param");
    }
  }
}

// A sum, a rounding and a parameter that leave fp16's range are infinite, as on the CPU.
TEST(CudaVectorOpsTest, BeyondFp16sRangeIsInfinityAsOnTheCpu) {
  const Values large = {65504, 65504, -65504, -65504, 60000, 8, 0.5, 32768};
  const Values more = {15, 16, -15, -16, 6000, 8, 0.5, 32768};
  const int64_t n = 8;
  Array<Fp16> a(large), b(more), sum(n), wanted(n);
  cpu::Add(a.data(), b.data(), n, DType::kF16, wanted.data(), 1);
  RunFlat(AddOp<Fp16>{a.data(), b.data(), sum.data()}, n, true);
  ExpectSameBits(sum, wanted, "sums");
  EXPECT_EQ(sum.values(), (Values{65504, INFINITY, -65504, -INFINITY, INFINITY, 16, 1, INFINITY}));

  Array<float> master({70000, -70000, 1, 65519, 65520, 2, 3, 4}), m(n), v(n);
  Array<float> grad(Values(8, 0.0));
  Array<Fp16> param(n);
  RunFlat(AdamWOp<float, Fp16>{AdamWFactorsOf({.learning_rate = 0}), grad.data(), master.data(),
                               m.data(), v.data(), param.data()},
          n, true);
  EXPECT_EQ(param.values(), (Values{INFINITY, -INFINITY, 1, 65504, INFINITY, 2, 3, 4}));
}

TEST(CudaVectorOpsTest, AdamWMayWriteParametersOverTheMaster) {
  const int64_t n = 100;
  Array<float> master(RandomValues(n, 9)), m(n), v(n), wanted = master, m2 = m, v2 = v, param(n);
  Array<float> grad(RandomValues(n, 10));
  const AdamWArgs args{.learning_rate = 3e-3f};
  cpu::AdamW(args, n, grad.data(), DType::kF32, wanted.data(), m2.data(), v2.data(), param.data(),
             DType::kF32, 1);
  RunFlat(AdamWOp<float, float>{AdamWFactorsOf(args), grad.data(), master.data(), m.data(),
                                v.data(), master.data()},
          n, true);
  ExpectSameBits(master, wanted, "master");
}

TEST(CudaDropoutTest, TheMaskIsTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const float rate : {0.1f, 0.5f, 1.0f}) {
      for (const int64_t per_sample : {1, 6, 8, 136, 2049}) {
        for (const bool aligned : {false, true}) {
          if (aligned && per_sample % kPack != 0) continue;
          const int64_t batch = 3, n = batch * per_sample;
          const DropoutArgs args{.rate = rate,
                                 .seed = 0xFEDCBA9876543210,
                                 .step = (uint64_t{5} << 33) + 1,
                                 .site = 2,
                                 .first_sample = 41};
          Array<T> x(RandomValues(n, 11)), y(n), wanted(n);
          cpu::Dropout(args, x.data(), batch, per_sample, dtype, wanted.data(), 1);
          const DropoutOp<T> op{DropoutRuleOf(args), args.first_sample, per_sample, x.data(),
                                y.data()};
          RunEach(op, batch, per_sample, aligned, 4);
          ExpectSameBits(y, wanted, "dropped");
        }
      }
    }
  });
}

// A part may begin within a block of the mask, where packs are not drawn.
TEST(CudaDropoutTest, APartOfATensorHasTheMaskOfTheWhole) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const int64_t first : {int64_t{4}, int64_t{3}, int64_t{1022}, int64_t{1} << 34}) {
      for (const bool aligned : {false, true}) {
        const int64_t batch = 3, per_sample = 136, n = batch * per_sample;
        const DropoutArgs args{.rate = 0.3f, .seed = 5, .step = 9, .first_element = first};
        const DropoutRule rule = DropoutRuleOf(args);
        EXPECT_EQ(BeginsBlock(rule), first % 4 == 0);
        if (aligned && !BeginsBlock(rule)) continue;
        Array<T> x(RandomValues(n, 11)), y(n), wanted(n);
        cpu::Dropout(args, x.data(), batch, per_sample, dtype, wanted.data(), 1);
        RunEach(DropoutOp<T>{rule, args.first_sample, per_sample, x.data(), y.data()}, batch,
                per_sample, aligned, 4);
        ExpectSameBits(y, wanted, "dropped");
      }
    }
  });
}

// Also where the block's number passes 32 bits.
TEST(CudaDropoutTest, AnElementsFactorIsThatOfItsBlock) {
  const DropoutArgs args{.rate = 0.3f, .seed = 77, .step = 4, .site = 1};
  const DropoutRule rule = DropoutRuleOf(args);
  const DropoutStream stream = DropoutStreamOf(rule, 9);
  for (const int64_t begin : {int64_t{0}, (int64_t{1} << 34) - 32}) {
    std::vector<float> wanted(64);
    cpu::DropoutMask(args, 9).Factors(begin, 64, wanted.data());
    for (int64_t i = 0; i < 64; ++i) {
      ASSERT_EQ(DropoutFactor(rule, stream, static_cast<uint64_t>(begin + i)),
                wanted[static_cast<size_t>(i)])
          << begin << " + " << i;
    }
  }
}

TEST(CudaDropoutTest, ARateBelowAnyWordDropsNothing) {
  EXPECT_EQ(DropoutThreshold({.rate = 0}), 0u);
  EXPECT_EQ(DropoutThreshold({.rate = 1e-11f}), 0u);
  EXPECT_EQ(DropoutThreshold({.rate = 1}), uint64_t{1} << 32);
  EXPECT_EQ(DropoutThreshold({.rate = 0.25f}), uint64_t{1} << 30);
}

struct RopeCase {
  int64_t batch, seq, heads, head_dim, gap, first;
};

TEST(CudaRopeTest, RotationsAreTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const RopeCase& c :
         {RopeCase{2, 9, 3, 16, 8, 0}, RopeCase{1, 5, 2, 6, 1, 1000}, RopeCase{3, 4, 1, 2, 0, 7}}) {
      for (const bool inverse : {false, true}) {
        for (const bool aligned : {false, true}) {
          const int64_t half = c.head_dim / 2, ld = c.heads * c.head_dim + c.gap;
          if (aligned && (half % kPack != 0 || ld % kPack != 0)) continue;
          Array<T> x(RandomValues(c.batch * c.seq * ld, 12)), wanted = x;
          std::vector<float> frequencies;
          for (int64_t i = 0; i < half; ++i)
            frequencies.push_back(std::pow(10000.0f, -static_cast<float>(i) / half));
          cpu::Rope(wanted.data(), ld, c.batch, c.seq, c.heads, c.head_dim, frequencies.data(),
                    c.first, inverse, dtype, 1);

          const int64_t positions = c.first + c.seq;
          Array<float> cosines(positions * half), sines(positions * half);
          RunEach(RopeTableOp{frequencies.data(), half, cosines.data(), sines.data()}, positions,
                  half, false);
          const RopeOp<T> op{x.data(),
                             ld,
                             c.seq,
                             static_cast<uint32_t>(half),
                             cosines.data() + c.first * half,
                             sines.data() + c.first * half,
                             inverse ? -1.0f : 1.0f};
          RunEach(op, c.batch * c.seq, c.heads * half, aligned);
          ExpectSameBits(x, wanted, "rotated");
        }
      }
    }
  });
}

std::vector<int32_t> RandomTokens(int64_t n, int32_t vocabulary, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t& token : tokens) token = static_cast<int32_t>(generator() % vocabulary);
  return tokens;
}

TEST(CudaEmbeddingTest, LookupsAreTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    const int64_t batch = 3, seq = 7, vocabulary = 40;
    for (const int64_t cols : {1, 8, 65, 256}) {
      for (const bool aligned : {false, true}) {
        if (aligned && cols % kPack != 0) continue;
        const auto tokens = RandomTokens(batch * seq, vocabulary, 13);
        Array<T> tok(Mixed(vocabulary * cols, 14)), pos(RandomValues(seq * cols, 15));
        for (T* positions : {pos.data(), static_cast<T*>(nullptr)}) {
          Array<T> y(batch * seq * cols), wanted(batch * seq * cols);
          cpu::EmbeddingForward(tokens.data(), tok.data(), positions, batch, seq, cols, dtype,
                                wanted.data(), 1);
          RunEach(LookupOp<T>{tokens.data(), tok.data(), positions, seq, cols, y.data()},
                  batch * seq, cols, aligned);
          ExpectSameBits(y, wanted, positions ? "with positions" : "without");
        }
      }
    }
  });
}

// The kernels in their order; the sort and the scan between them are the host's.
template <class T>
void BackwardRows(const T* dy, const std::vector<int32_t>& tokens, int64_t cols, bool aligned,
                  std::vector<int32_t>* ids, T* rows) {
  const auto count = static_cast<int64_t>(tokens.size());
  std::vector<int32_t> places(tokens.size()), sorted(tokens.size()), ranks(tokens.size()),
      starts(tokens.size() + 1);
  RunEach(OneByOne{NumberOp{places.data()}}, 1, count, false);
  const auto key = [&](int32_t place) {
    return static_cast<uint32_t>(tokens[static_cast<size_t>(place)]) & ((1u << kTokenBits) - 1);
  };
  std::stable_sort(places.begin(), places.end(),
                   [&](int32_t a, int32_t b) { return key(a) < key(b); });
  for (size_t i = 0; i < tokens.size(); ++i) sorted[i] = tokens[static_cast<size_t>(places[i])];
  RunEach(OneByOne{MarkFirstOp{sorted.data(), ranks.data()}}, 1, count, false);
  std::inclusive_scan(ranks.begin(), ranks.end(), ranks.begin());
  RunEach(OneByOne{StartsOp{sorted.data(), ranks.data(), count, starts.data(), ids->data()}}, 1,
          count, false);
  RunEach(SumPlacesOp<T>{dy, places.data(), starts.data(), ranks.data() + (count - 1), cols, rows},
          count, cols, aligned);
}

// Where `others` every so-manieth token is another rank's.
TEST(CudaEmbeddingTest, TheGradientsRowsAreTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const auto& [vocabulary, others] : {std::pair<int32_t, size_t>{1, 0},
                                             {30, 0},
                                             {1000000, 0},
                                             {30, 3},
                                             {1000000, 2},
                                             {30, 1}}) {
      for (const int64_t cols : {1, 8, 65}) {
        for (const bool aligned : {false, true}) {
          if (aligned && cols % kPack != 0) continue;
          const int64_t batch = 2, seq = 61, count = batch * seq;
          auto tokens = RandomTokens(count, vocabulary, 16);
          for (size_t i = 0; others > 0 && i < tokens.size(); i += others) tokens[i] = -1;
          Array<T> dy(RandomValues(count * cols, 17)), rows(count * cols), wanted(count * cols);
          std::vector<int32_t> ids(tokens.size(), 12345), wanted_ids(tokens.size(), 54321);
          cpu::EmbeddingBackwardRows(dy.data(), tokens.data(), batch, seq, cols, dtype,
                                     wanted_ids.data(), wanted.data(), 1);
          BackwardRows(dy.data(), tokens, cols, aligned, &ids, rows.data());
          EXPECT_EQ(ids, wanted_ids);
          ExpectSameBits(rows, wanted, "rows");
        }
      }
    }
  });
}

}  // namespace
}  // namespace zeroshard::cuda
