#include "common/plan/pipeline_stages.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>

#include "common/plan/capacity.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// (largest, sum of squares, where runs begin): the order in which cuts are preferred.
using Rank = std::tuple<int64_t, int64_t, std::vector<int>>;

Rank RankOf(const std::vector<int64_t>& costs, const std::vector<int>& begin) {
  int64_t largest = 0, squares = 0;
  for (size_t k = 0; k + 1 < begin.size(); ++k) {
    const int64_t cost =
        std::accumulate(costs.begin() + begin[k], costs.begin() + begin[k + 1], int64_t{0});
    largest = std::max(largest, cost);
    squares += cost * cost;
  }
  return {largest, squares, begin};
}

// Every set of `runs` - 1 places to cut at, as bits.
Rank BruteForce(const std::vector<int64_t>& costs, int runs) {
  const int n = static_cast<int>(costs.size());
  std::optional<Rank> best;
  for (int cuts = 0; cuts < 1 << (n - 1); ++cuts) {
    if (__builtin_popcount(static_cast<unsigned>(cuts)) != runs - 1) continue;
    std::vector<int> begin = {0};
    for (int u = 1; u < n; ++u) {
      if (cuts >> (u - 1) & 1) begin.push_back(u);
    }
    begin.push_back(n);
    const Rank rank = RankOf(costs, begin);
    if (!best || rank < *best) best = rank;
  }
  return *best;
}

TEST(CutStages, IsTheBestOfAllCutsOfEverySmallModel) {
  for (size_t n = 1; n <= 6; ++n) {
    std::vector<int64_t> costs(n, 0);
    for (int code = 0; code < 1 << (2 * n); ++code) {
      for (size_t u = 0; u < n; ++u) costs[u] = code >> (2 * u) & 3;
      for (int runs = 1; runs <= static_cast<int>(n); ++runs) {
        const auto stages = CutStages(costs, runs, 1);
        ASSERT_TRUE(stages.ok()) << stages.status();
        ASSERT_EQ(stages->begin, std::get<2>(BruteForce(costs, runs)));
      }
    }
  }
}

TEST(CutStages, IsTheBestOfAllCutsWithUnequalCosts) {
  uint64_t state = 7;
  const auto next = [&state] {
    return state = state * 6364136223846793005u + 1442695040888963407u;
  };
  for (int round = 0; round < 40; ++round) {
    std::vector<int64_t> costs(10);
    for (int64_t& cost : costs) cost = static_cast<int64_t>(next() >> 33) % 1000;
    for (int runs = 1; runs <= 10; ++runs) {
      const auto stages = CutStages(costs, runs, 1);
      ASSERT_TRUE(stages.ok()) << stages.status();
      EXPECT_EQ(stages->begin, std::get<2>(BruteForce(costs, runs)));
    }
  }
}

// Thirty layers in four stages: none is dropped, and the ends, which have the embedding and the
// head besides, get the shorter runs.
TEST(CutStages, LayersThatTheStagesDoNotDivideAreAllThere) {
  std::vector<int64_t> costs(32, 100);
  costs.front() = costs.back() = 1;
  const auto stages = CutStages(costs, 4, 1);
  ASSERT_TRUE(stages.ok()) << stages.status();
  EXPECT_THAT(stages->begin, ElementsAre(0, 8, 16, 24, 32));
  // Blocks alone: the longer runs come last.
  EXPECT_THAT(CutStages(std::vector<int64_t>(30, 100), 4, 1)->begin, ElementsAre(0, 7, 14, 22, 30));
}

TEST(CutStages, TilesTheUnitsOverTheRanksInTurn) {
  for (int units = 1; units <= 24; ++units) {
    const std::vector<int64_t> costs(static_cast<size_t>(units), 5);
    for (int p = 1; p <= 8; ++p) {
      for (int v = 1; v <= 3; ++v) {
        const auto stages = CutStages(costs, p, v);
        ASSERT_EQ(stages.ok(), p * v <= units);
        if (!stages.ok()) continue;
        ASSERT_EQ(stages->Count(), p * v);
        EXPECT_EQ(stages->Begin(0), 0);
        EXPECT_EQ(stages->End(p * v - 1), units);
        EXPECT_EQ(stages->RankOf(p * v - 1), p - 1);
        for (int k = 0; k < p * v; ++k) {
          EXPECT_LT(stages->Begin(k), stages->End(k));
          // Equal units: no two runs differ by more than one.
          EXPECT_LE(stages->End(k) - stages->Begin(k), (units + p * v - 1) / (p * v));
          for (int u = stages->Begin(k); u < stages->End(k); ++u) EXPECT_EQ(stages->StageOf(u), k);
        }
      }
    }
  }
}

TEST(CutStages, MoreStagesThanUnitsAndCostsOutOfRangeAreRefused) {
  const auto few = CutStages({1, 1, 1, 1}, 3, 2);
  EXPECT_EQ(few.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(few.status().message(),
              HasSubstr("parallel.pipeline x parallel.virtual_stages: seen 3 x 2 stages for 4"));
  EXPECT_THAT(few.status().message(), HasSubstr("wanted 1 to 4"));
  EXPECT_FALSE(CutStages({1, 1}, 0, 1).ok());
  EXPECT_FALSE(CutStages({}, 1, 1).ok());
  EXPECT_THAT(CutStages({1, -2}, 1, 1).status().message(), HasSubstr("cost of unit 1: seen -2"));
  EXPECT_THAT(CutStages({int64_t{1} << 61, int64_t{1} << 61}, 2, 1).status().message(),
              HasSubstr("cost of unit 1"));
}

TEST(CutStages, FourThousandLayersAreCutAtOnce) {
  const std::vector<int64_t> costs(4098, int64_t{1} << 40);
  const auto stages = CutStages(costs, 64, 3);
  ASSERT_TRUE(stages.ok()) << stages.status();
  EXPECT_EQ(stages->End(191), 4098);
}

// A head of 50257 x 768 costs as much as five blocks: stages get fewer of them before it.
TEST(CutStages, TheHeadsStageOfGpt2SmallHasFewerBlocks) {
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(768);
  spec.set_layers(12);
  spec.set_heads(12);
  spec.set_sequence_length(1024);
  spec.set_vocab_size(50257);
  const auto config = MakeModelConfig(spec);
  ASSERT_TRUE(config.ok()) << config.status();
  const std::vector<int64_t> costs = UnitCosts(*config, false);
  const int64_t block = 3 * (2 * 12 * 768 * 768 + 2 * 1024 * 768);
  EXPECT_EQ(costs[1], block);
  EXPECT_EQ(costs.back(), int64_t{3} * 2 * 50257 * 768);
  // 12 blocks and a head of 4.9: nine before, three and the head behind.
  EXPECT_THAT(CutStages(costs, 2, 1)->begin, ElementsAre(0, 9, 14));
}

TEST(StageTimesTest, BackwardIsTwiceTheForwardAndOnceMoreOfBlocksComputedAgain) {
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(64);
  spec.set_layers(4);
  spec.set_heads(4);
  spec.set_sequence_length(32);
  spec.set_vocab_size(101);
  const auto config = MakeModelConfig(spec);
  ASSERT_TRUE(config.ok()) << config.status();
  const PipelineStages stages{.pipeline = 2, .begin = {0, 3, 6}};
  const double block = 2 * (12 * 64 * 64 + 32 * 64), head = 2 * 101 * 64, embedding = 2 * 64;
  for (const bool again : {false, true}) {
    const std::vector<StageTime> times = StageTimes(stages, *config, again);
    ASSERT_EQ(times.size(), 2u);
    EXPECT_DOUBLE_EQ(times[0].forward, 2 * block + embedding / 3);
    EXPECT_DOUBLE_EQ(times[0].backward, 2 * (again ? 3 : 2) * block + embedding * 2 / 3);
    EXPECT_DOUBLE_EQ(times[1].forward, 2 * block + head);
    EXPECT_DOUBLE_EQ(times[1].backward, 2 * (again ? 3 : 2) * block + 2 * head);
  }
}

TEST(UnitCostsTest, AreThePlannersOperationsForThreePassesAndFourOfBlocksComputedAgain) {
  for (const char* architecture : {"gpt2", "llama"}) {
    v1::ModelSpec spec;
    spec.set_architecture(architecture);
    spec.set_hidden_size(512);
    spec.set_layers(6);
    spec.set_heads(8);
    if (spec.architecture() == "llama") spec.set_kv_heads(2);
    spec.set_sequence_length(256);
    spec.set_vocab_size(1001);
    const auto config = MakeModelConfig(spec);
    ASSERT_TRUE(config.ok()) << config.status();
    const std::vector<int64_t> costs = UnitCosts(*config, false);
    ASSERT_EQ(costs.size(), 8u);
    const int64_t sum = std::accumulate(costs.begin(), costs.end(), int64_t{0});
    const double products = 3 * ForwardOperations(*config);
    EXPECT_EQ(static_cast<double>(sum - costs.front()), products);
    EXPECT_LT(static_cast<double>(costs.front()), 1e-3 * products);
    const std::vector<int64_t> again = UnitCosts(*config, true);
    EXPECT_EQ(3 * again[1], 4 * costs[1]);
    EXPECT_EQ(again.back(), costs.back());
  }
}

}  // namespace
}  // namespace zeroshard
