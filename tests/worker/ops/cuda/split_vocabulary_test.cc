// The kernels of ranks that have some of a vocabulary each, against the CPU's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/worker/ops/cuda/launch_emulation.h"
#include "worker/ops/cross_entropy_columns.h"
#include "worker/ops/cuda/cross_entropy.h"
#include "worker/ops/cuda/embedding.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard::cuda {
namespace {

using cpu::RandomValues;
using cpu::Values;

TEST(CudaSplitVocabularyTest, LocalIdsAreTheCpus) {
  const std::vector<int32_t> ids = {0, 4, 7, 8, -1, 3, 5, 2147483646};
  const auto n = static_cast<int64_t>(ids.size());
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{4, 8}, {0, 5}, {8, 8}, {0, 0}}) {
    std::vector<int32_t> local(ids.size(), 77), wanted(ids.size(), 66);
    cpu::LocalIds(ids.data(), n, begin, end, wanted.data());
    RunEach(OneByOne{LocalIdOp{ids.data(), begin, end, local.data()}}, 1, n, false);
    EXPECT_EQ(local, wanted) << begin << " " << end;
  }
}

TEST(CudaSplitVocabularyTest, LookupsAreTheCpusAndZeroWhereTheRowIsAnotherRanks) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    const std::vector<int32_t> local = {3, -1, 0, 0, -1, 5};
    const int64_t n = 6;
    for (const int64_t cols : {1, 8, 65, 256}) {
      for (const bool aligned : {false, true}) {
        if (aligned && cols % kPack != 0) continue;
        Array<T> table(RandomValues(6 * cols, 14)), y(RandomValues(n * cols, 1)), wanted(n * cols);
        cpu::LookupRows(local.data(), table.data(), n, cols, dtype, wanted.data(), 1);
        RunEach(LookupRowsOp<T>{local.data(), table.data(), cols, y.data()}, n, cols, aligned);
        ExpectSameBits(y, wanted, "rows");
      }
    }
  });
}

// The two kernels of SoftmaxPart.
template <class T>
void RunPart(const T* logits, const std::vector<int32_t>& local_targets, int64_t v, bool aligned,
             float* part) {
  const auto rows = static_cast<int64_t>(local_targets.size());
  const int64_t chunks = CeilDiv(v, kVocabularyChunk);
  std::vector<float> maxima(static_cast<size_t>(chunks * rows), NAN), sums = maxima;
  const ChunkSums chunk_sums{maxima.data(), sums.data()};
  RunEach(ChunkSumsOp<T>{logits, rows, v, chunk_sums}, chunks, rows, aligned);
  for (int64_t col = 0; col < rows; ++col) {
    OnlineSum total = JoinChunks(chunk_sums, rows, chunks, col, 0);
    for (int part_of = 1; part_of < kJoinParts; ++part_of)
      total = Join(total, JoinChunks(chunk_sums, rows, chunks, col, part_of));
    FinishPart<T>{logits, local_targets.data(), rows, part}(total, col);
  }
}

// And those of CrossEntropyOfParts.
template <class T>
void RunOfParts(const std::vector<float>& parts, int ranks, T* logits,
                const std::vector<int32_t>& targets, const std::vector<int32_t>& local_targets,
                int64_t v, float gradient_scale, bool aligned, float* losses) {
  const auto rows = static_cast<int64_t>(targets.size());
  std::vector<float> maxima(targets.size(), NAN), scales = maxima;
  const ColumnScales columns{maxima.data(), scales.data()};
  RunEach(OneByOne{JoinPartsOp{parts.data(), ranks, targets.data(), rows, losses, columns}}, 1,
          rows, false);
  if (gradient_scale == 0) return;
  RunEach(SoftmaxGradOp<T>{logits, local_targets.data(), rows, v, gradient_scale, columns},
          CeilDiv(v, kVocabularyChunk), rows, aligned);
}

struct Split {
  std::vector<float> parts;                // [ranks, 3, rows]
  std::vector<std::vector<float>> losses;  // by rank
};

// The ranks one after the other, each on its rows of logits [v, rows]; with more ranks than rows
// the last ones have none.
template <class T>
Split RunRanks(T* logits, const std::vector<int32_t>& targets, int64_t v, int ranks,
               float gradient_scale, bool aligned) {
  const auto rows = static_cast<int64_t>(targets.size());
  const auto begin = [&](int rank) { return std::min(v, rank * CeilDiv(v, ranks)); };
  Split split{std::vector<float>(static_cast<size_t>(ranks * 3 * rows), NAN), {}};
  std::vector<std::vector<int32_t>> local;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<int32_t>& mine = local.emplace_back(targets.size());
    RunEach(OneByOne{LocalIdOp{targets.data(), begin(rank), begin(rank + 1), mine.data()}}, 1, rows,
            false);
    RunPart(logits + begin(rank) * rows, mine, begin(rank + 1) - begin(rank), aligned,
            split.parts.data() + rank * 3 * rows);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    split.losses.emplace_back(targets.size(), -1.0f);
    RunOfParts(split.parts, ranks, logits + begin(rank) * rows, targets,
               local[static_cast<size_t>(rank)], begin(rank + 1) - begin(rank), gradient_scale,
               aligned, split.losses.back().data());
  }
  return split;
}

std::vector<int32_t> Targets(int64_t rows, int64_t v) {
  std::vector<int32_t> targets;
  for (int64_t r = 0; r < rows; ++r)
    targets.push_back(r % 4 == 3 ? -1 : static_cast<int32_t>((r * 7919 + v - 1) % v));
  return targets;
}

TEST(CudaSplitVocabularyTest, ARanksPartIsTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const int64_t rows : {1, 8, 37}) {
      for (const int64_t v : {0, 1, 129, 1300}) {
        for (const bool aligned : {false, true}) {
          if (aligned && rows % kPack != 0) continue;
          const std::vector<int32_t> targets =
              v == 0 ? std::vector<int32_t>(static_cast<size_t>(rows), -1) : Targets(rows, v);
          Array<T> logits(RandomValues(rows * v, 6, 4));
          std::vector<float> part(static_cast<size_t>(3 * rows), -7), wanted = part;
          cpu::SoftmaxPart(logits.data(), targets.data(), rows, v, dtype, wanted.data(), 1);
          RunPart<T>(logits.data(), targets, v, aligned, part.data());
          for (size_t i = 0; i < part.size(); ++i) {
            const bool is_sum = i / static_cast<size_t>(rows) == 1;
            if (is_sum) {
              ASSERT_NEAR(part[i], wanted[i], 2e-6 * wanted[i]) << i;
            } else {
              ASSERT_EQ(part[i], wanted[i]) << i;
            }
          }
        }
      }
    }
  });
}

TEST(CudaSplitVocabularyTest, LossesAndGradientsAreThoseOfTheWholeVocabulary) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const int64_t rows : {1, 8, 37}) {
      for (const int64_t v : {1, 5, 257, 1000}) {
        for (const int ranks : {1, 2, 4}) {
          for (const bool aligned : {false, true}) {
            if (aligned && rows % kPack != 0) continue;
            const std::vector<int32_t> targets = Targets(rows, v);
            Array<T> logits(RandomValues(rows * v, 11, 4)), wanted = logits, kept = logits;
            std::vector<float> losses(targets.size());
            cpu::CrossEntropyColumns(wanted.data(), targets.data(), rows, v, dtype, 2.0f,
                                     losses.data(), 1);
            const Split only = RunRanks(kept.data(), targets, v, ranks, 0, aligned);
            ExpectSameBits(kept, logits, "without the gradient the logits stay");
            const Split split = RunRanks(logits.data(), targets, v, ranks, 2.0f, aligned);
            EXPECT_EQ(split.losses, only.losses);
            for (const std::vector<float>& seen : split.losses) {
              EXPECT_EQ(seen, split.losses[0]) << "the same bits on every rank";
              for (size_t r = 0; r < losses.size(); ++r)
                ASSERT_NEAR(seen[r], losses[r], 3e-6 * (1 + losses[r]));
            }
            // Neighbours of the type; of a target's probability near 1, 1 is taken.
            const double spacing = dtype == DType::kF32    ? 3e-6
                                   : dtype == DType::kBF16 ? 0x1p-7
                                                           : 0x1p-9;
            const Values gradient = logits.values(), of_cpu = wanted.values();
            for (size_t i = 0; i < gradient.size(); ++i)
              ASSERT_NEAR(gradient[i], of_cpu[i], spacing * std::abs(of_cpu[i]) + 2e-6) << i;
          }
        }
      }
    }
  });
}

// So that tensor parallelism of one rank is none.
TEST(CudaSplitVocabularyTest, OneRanksPartHasTheBitsOfTheWholeVocabularysKernel) {
  const int64_t rows = 24, v = 700;
  const std::vector<int32_t> targets = Targets(rows, v);
  Array<Bf16> whole(RandomValues(rows * v, 12, 4)), split = whole;
  const int64_t chunks = CeilDiv(v, kVocabularyChunk);
  std::vector<float> maxima(static_cast<size_t>(chunks * rows)), sums = maxima;
  std::vector<float> column_maxima(targets.size()), scales = column_maxima, losses = scales;
  const ChunkSums chunk_sums{maxima.data(), sums.data()};
  const ColumnScales columns{column_maxima.data(), scales.data()};
  RunEach(ChunkSumsOp<Bf16>{whole.data(), rows, v, chunk_sums}, chunks, rows, true);
  for (int64_t col = 0; col < rows; ++col) {
    OnlineSum total = JoinChunks(chunk_sums, rows, chunks, col, 0);
    for (int part = 1; part < kJoinParts; ++part)
      total = Join(total, JoinChunks(chunk_sums, rows, chunks, col, part));
    FinishLosses<Bf16>{whole.data(), targets.data(), rows, losses.data(), columns}(total, col);
  }
  RunEach(SoftmaxGradOp<Bf16>{whole.data(), targets.data(), rows, v, 0.5f, columns}, chunks, rows,
          true);
  const Split seen = RunRanks(split.data(), targets, v, 1, 0.5f, true);
  EXPECT_EQ(seen.losses[0], losses);
  ExpectSameBits(split, whole, "gradient");
}

TEST(CudaSplitVocabularyTest, ALogitThatIsNotFinitePoisonsItsColumnOnEveryRank) {
  const int64_t rows = 8, v = 300;
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    for (const int64_t at : {int64_t{0}, v - 1}) {
      Values values = RandomValues(rows * v, 13);
      values[static_cast<size_t>(at * rows + 4)] = bad;
      Array<float> logits(values);
      const Split split = RunRanks(logits.data(), std::vector<int32_t>(8, 1), v, 3, 1, false);
      for (const std::vector<float>& losses : split.losses) {
        for (size_t r = 0; r < 8; ++r) EXPECT_EQ(std::isnan(losses[r]), r == 4);
      }
      const Values gradient = logits.values();
      for (size_t i = 0; i < gradient.size(); ++i)
        ASSERT_EQ(std::isnan(gradient[i]), i % 8 == 4) << i;
    }
  }
}

// exp(300 - 299): the largest logits of two ranks, far above fp32's exponential's range.
TEST(CudaSplitVocabularyTest, MaximaOfRanksThatAreFarApartNeitherOverflowNorVanish) {
  const int64_t v = 400;
  Values values(static_cast<size_t>(v), -300.0);
  values[7] = 300;
  values[390] = 299;
  Array<float> logits(values);
  const Split split = RunRanks(logits.data(), {390}, v, 2, 1, false);
  const double wanted = 1 + std::log1p(std::exp(-1.0));
  for (const std::vector<float>& losses : split.losses) EXPECT_NEAR(losses[0], wanted, 1e-6);
  const double p = 1 / (1 + std::exp(-1.0));
  EXPECT_NEAR(logits.values()[7], p, 1e-6);
  EXPECT_NEAR(logits.values()[390], -p, 1e-6);
}

}  // namespace
}  // namespace zeroshard::cuda
