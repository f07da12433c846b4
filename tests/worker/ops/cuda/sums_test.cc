// Kernels that add up elements: columns, norms, squares, losses.
#include <gtest/gtest.h>

#include "tests/worker/ops/cuda/launch_emulation.h"
#include "worker/ops/cuda/column_sum.h"
#include "worker/ops/cuda/cross_entropy.h"
#include "worker/ops/cuda/norm_squares.h"
#include "worker/ops/cuda/norms.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard::cuda {
namespace {

using cpu::ExpectClose;
using cpu::RandomValues;
using cpu::Values;

// As LaunchColumnSums.
template <int K, class T, class F>
void RunColumnSums(const F& f, int64_t rows, int64_t cols, bool aligned,
                   const std::array<T*, K>& outs) {
  const int64_t chunks = SumChunks(rows);
  std::vector<float> partials(static_cast<size_t>(K * chunks * cols), NAN);
  RunEach(ChunkSumOp<K, F>{f, rows, cols, chunks, partials.data()}, chunks, cols, aligned);
  FoldSumOp<K, T> fold{partials.data(), cols, chunks, {}};
  for (int k = 0; k < K; ++k) fold.outs[k] = outs[static_cast<size_t>(k)];
  RunEach(fold, K, cols, aligned);
}

TEST(CudaColumnSumTest, SumsAreTheCpus) {
  ForEachType([](auto element, DType dtype) {
    ForEachType([&](auto out_element, DType out_type) {
      using T = decltype(element);
      using Out = decltype(out_element);
      for (const int64_t rows : {0, 1, 63, 64, 65, 300}) {
        for (const int64_t cols : {1, 8, 65, 264}) {
          for (const bool aligned : {false, true}) {
            if (aligned && cols % kPack != 0) continue;
            Array<T> x(RandomValues(rows * cols, 1));
            Array<Out> out(cols), wanted(cols);
            cpu::ColumnSum(x.data(), rows, cols, dtype, wanted.data(), out_type, 1);
            RunColumnSums<1, Out>(ColumnTerms<T>{x.data(), cols}, rows, cols, aligned,
                                  {out.data()});
            ExpectSameBits(out, wanted, "sums");
          }
        }
      }
    });
  });
}

// FoldTeam of fold_team.cuh: butterflies over the lanes of each warp, then over the warps.
float FoldWarp(std::vector<float> lanes) {
  lanes.resize(32);
  for (size_t half = 16; half > 0; half /= 2) {
    const std::vector<float> before = lanes;
    for (size_t lane = 0; lane < 32; ++lane) lanes[lane] = before[lane] + before[lane ^ half];
  }
  for (const float lane : lanes) EXPECT_EQ(lane, lanes[0]) << "all lanes have the same bits";
  return lanes[0];
}
float FoldTeam(const std::vector<float>& threads) {
  std::vector<float> warps;
  for (size_t i = 0; i < threads.size(); i += 32) {
    warps.push_back(FoldWarp({threads.begin() + static_cast<std::ptrdiff_t>(i),
                              threads.begin() + static_cast<std::ptrdiff_t>(i + 32)}));
  }
  return warps.size() == 1 ? warps[0] : FoldWarp(warps);
}

// Calls part(columns of a thread) for each of a row's team, and folds what comes back.
template <bool kAligned, class Part>
float TeamSum(int64_t cols, const Part& part) {
  const int team = NormTeam(cols);
  std::vector<float> parts;
  for (int thread = 0; thread < team; ++thread) {
    parts.push_back(part(ThreadCols<kAligned>{cols, thread, team}));
  }
  return FoldTeam(parts);
}

template <bool kAligned, class T, bool kCenter>
void RunNorm(const NormOp<T, kCenter>& op, int64_t rows) {
  const int team = NormTeam(op.cols);
  for (int64_t row = 0; row < rows; ++row) {
    float center = 0;
    if (kCenter) {
      center =
          op.Mean(TeamSum<kAligned>(op.cols, [&](const auto& mine) { return op.Sum(row, mine); }));
    }
    const float scale = op.Scale(TeamSum<kAligned>(
        op.cols, [&](const auto& mine) { return op.Squares(row, center, mine); }));
    for (int thread = team; thread-- > 0;) {
      op.Write(row, center, scale, ThreadCols<kAligned>{op.cols, thread, team});
    }
  }
}

template <bool kAligned, class T, bool kCenter>
void RunNorm(const NormGradOp<T, kCenter>& op, int64_t rows) {
  const int team = NormTeam(op.cols);
  for (int64_t row = 0; row < rows; ++row) {
    float sums[2];
    for (int k = 0; k < 2; ++k) {
      sums[k] = TeamSum<kAligned>(op.cols, [&](const auto& mine) {
        float parts[2];
        op.Sums(row, mine, parts);
        return parts[k];
      });
    }
    for (int thread = team; thread-- > 0;) {
      op.Write(row, sums, ThreadCols<kAligned>{op.cols, thread, team});
    }
  }
}

struct Shape {
  int64_t rows, cols;
};
// One for each team, with whole packs and without.
const Shape kShapes[] = {{1, 1}, {70, 8}, {3, 65}, {5, 768}, {2, 2049}, {2, 4096}, {1, 9000}};

// The sums' order differs from the CPU's: each result within some units of the last place of the
// largest.
double Bound(DType dtype) {
  if (dtype == DType::kF16) return 0x1p-10;
  return dtype == DType::kBF16 ? 0x1p-8 : 1e-6;
}

template <class T, bool kCenter>
void ForwardIsCloseToTheCpus(DType dtype, const Shape& shape, bool aligned) {
  const auto [rows, cols] = shape;
  Array<T> x(RandomValues(rows * cols, 2, 1, 0.5)), weight(RandomValues(cols, 3, 0.3, 1));
  Array<T> bias(RandomValues(cols, 4)), y(rows * cols), wanted(rows * cols);
  Array<float> mean(rows), rstd(rows), wanted_mean(rows), wanted_rstd(rows);
  constexpr float kEps = 1e-5f;
  if (kCenter) {
    cpu::LayerNormForward(x.data(), weight.data(), bias.data(), rows, cols, kEps, dtype,
                          wanted.data(), wanted_mean.data(), wanted_rstd.data(), 1);
  } else {
    cpu::RmsNormForward(x.data(), weight.data(), rows, cols, kEps, dtype, wanted.data(),
                        wanted_rstd.data(), 1);
  }
  const NormOp<T, kCenter> op{x.data(), weight.data(), bias.data(), cols,
                              kEps,     y.data(),      mean.data(), rstd.data()};
  aligned ? RunNorm<true>(op, rows) : RunNorm<false>(op, rows);
  ExpectClose(rstd.values(), wanted_rstd.values(), 1e-6, "rstd");
  ExpectClose(y.values(), wanted.values(), Bound(dtype), "y");
  if (kCenter) ExpectClose(mean.values(), wanted_mean.values(), 1e-6, "mean");
}

TEST(CudaNormsTest, ForwardIsCloseToTheCpus) {
  ForEachType([](auto element, DType dtype) {
    for (const Shape& shape : kShapes) {
      for (const bool aligned : {false, true}) {
        if (aligned && shape.cols % kPack != 0) continue;
        ForwardIsCloseToTheCpus<decltype(element), true>(dtype, shape, aligned);
        ForwardIsCloseToTheCpus<decltype(element), false>(dtype, shape, aligned);
      }
    }
  });
}

template <class T>
struct Gradients {
  Array<T> dx, d_weight, d_bias;
};

template <class T, bool kCenter>
void BackwardIsTheCpus(DType dtype, const Shape& shape, bool aligned, bool accumulate,
                       bool in_place) {
  const auto [rows, cols] = shape;
  Array<T> x(RandomValues(rows * cols, 5)), weight(RandomValues(cols, 6, 0.3, 1));
  Array<T> dy(RandomValues(rows * cols, 7));
  Array<float> mean(RandomValues(rows, 8, 0.1)), rstd(RandomValues(rows, 9, 0.1, 1));
  Gradients<T> seen{Array<T>(RandomValues(rows * cols, 10)), Array<T>(cols), Array<T>(cols)};
  Gradients<T> wanted = seen;
  if (kCenter) {
    cpu::LayerNormBackward(dy.data(), x.data(), weight.data(), mean.data(), rstd.data(), rows, cols,
                           dtype, accumulate, wanted.dx.data(), wanted.d_weight.data(),
                           wanted.d_bias.data(), 1);
  } else {
    cpu::RmsNormBackward(dy.data(), x.data(), weight.data(), rstd.data(), rows, cols, dtype,
                         accumulate, wanted.dx.data(), wanted.d_weight.data(), 1);
  }
  using Terms = NormWeightTerms<T, kCenter>;
  const Terms terms{dy.data(), x.data(), mean.data(), rstd.data(), cols};
  std::array<T*, Terms::kSums> outs = {seen.d_weight.data()};
  if constexpr (kCenter) outs[1] = seen.d_bias.data();
  RunColumnSums<Terms::kSums, T>(terms, rows, cols, aligned, outs);
  ExpectSameBits(seen.d_weight, wanted.d_weight, "d_weight");
  ExpectSameBits(seen.d_bias, wanted.d_bias, "d_bias");

  Array<T>& dx = in_place ? dy : seen.dx;
  const NormGradOp<T, kCenter> op{dy.data(),   x.data(), weight.data(), mean.data(),
                                  rstd.data(), cols,     accumulate,    dx.data()};
  aligned ? RunNorm<true>(op, rows) : RunNorm<false>(op, rows);
  ExpectClose(dx.values(), wanted.dx.values(), Bound(dtype), "dx");
}

TEST(CudaNormsTest, BackwardHasTheCpusWeightGradientsAndIsCloseInTheInputs) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const Shape& shape : kShapes) {
      for (const bool aligned : {false, true}) {
        if (aligned && shape.cols % kPack != 0) continue;
        for (const bool accumulate : {false, true}) {
          BackwardIsTheCpus<T, true>(dtype, shape, aligned, accumulate, false);
          BackwardIsTheCpus<T, false>(dtype, shape, aligned, accumulate, false);
        }
        BackwardIsTheCpus<T, true>(dtype, shape, aligned, false, true);
      }
    }
  });
}

// As SquaresKernel: blocks are taken in an order of their own.
template <class T>
void RunSquares(const T* x, int64_t n, NormAccumulator* acc) {
  constexpr int kParts = 3;
  NormAccumulator parts[kParts];
  for (int64_t block = CeilDiv(n, kSquareBlock); block-- > 0;) {
    double lanes[kSquareLanes];
    for (int lane = 0; lane < kSquareLanes; ++lane) lanes[lane] = LaneSquares(x, n, block, lane);
    for (int half = kSquareLanes / 2; half > 0; half /= 2) {
      double folded[kSquareLanes];
      for (int lane = 0; lane < kSquareLanes; ++lane)
        folded[lane] = lanes[lane] + lanes[lane ^ half];
      std::copy_n(folded, kSquareLanes, lanes);
    }
    AddBlock(lanes[0], &parts[block % kParts]);
  }
  AddPart(parts[1], &parts[0]);
  AddPartShared(parts[0], acc);
  AddPartShared(parts[2], acc);
}

bool Same(const NormAccumulator& a, const NormAccumulator& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

TEST(CudaSquaresTest, SumsAreTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const int64_t n : {1, 8, 63, 64, 65, 1000, 20011}) {
      for (const double scale : {1e-18, 1e-3, 1.0, 1e13}) {
        Values values = RandomValues(n, 11, scale);
        for (const bool finite : {true, false}) {
          if (!finite) values[static_cast<size_t>(n / 2)] = NAN;
          Array<T> x(values);
          NormAccumulator seen{.low = UINT64_MAX, .middle = UINT64_MAX, .high = 3}, wanted = seen;
          cpu::AddSquares(x.data(), n, dtype, &wanted, 1);
          RunSquares(x.data(), n, &seen);
          ASSERT_TRUE(Same(seen, wanted)) << n << " elements of " << scale;
        }
      }
    }
  });
}

TEST(CudaSquaresTest, BlocksOfEveryMagnitudeAddAsTheCpus) {
  for (int power = -180; power < 110; ++power) {
    for (const double factor : {1.0, 1.75, 1.0 + 0x1p-52, 2.0 - 0x1p-52}) {
      const double block = std::ldexp(factor, power);
      NormAccumulator seen, wanted;
      for (int i = 0; i < 5; ++i) {
        AddBlock(block, &seen);
        wanted.AddBlock(block);
      }
      ASSERT_TRUE(Same(seen, wanted)) << block;
    }
  }
  for (const double block :
       {0.0, 5e-324, static_cast<double>(INFINITY), static_cast<double>(NAN)}) {
    NormAccumulator seen, wanted;
    AddBlock(block, &seen);
    wanted.AddBlock(block);
    EXPECT_TRUE(Same(seen, wanted)) << block;
  }
}

TEST(CudaSquaresTest, CarriesPassThroughAllWords) {
  const uint64_t full = UINT64_MAX;
  const NormAccumulator cases[] = {{.low = 1},
                                   {.low = full, .middle = full},
                                   {.low = full, .middle = full, .high = full},
                                   {.middle = full, .high = 5},
                                   {.low = 1, .middle = full, .high = full, .nonfinite = 7},
                                   {.high = full}};
  for (const NormAccumulator& start : cases) {
    for (const NormAccumulator& part : cases) {
      NormAccumulator plain = start, shared = start, wanted = start;
      wanted.Add(part);
      AddPart(part, &plain);
      AddPartShared(part, &shared);
      EXPECT_TRUE(Same(plain, wanted));
      EXPECT_TRUE(Same(shared, wanted));
    }
  }
}

}  // namespace
}  // namespace zeroshard::cuda
