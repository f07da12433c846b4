// The order of samples: each once an epoch, the same for any world size, another each epoch.
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <vector>

#include "worker/data/dataset.h"

namespace zeroshard {
namespace {

std::vector<int64_t> Epoch(const SampleOrder& order, int64_t samples, int64_t epoch) {
  std::vector<int64_t> result;
  for (int64_t i = 0; i < samples; ++i) result.push_back(order.At(epoch * samples + i));
  return result;
}

TEST(SampleOrderTest, EachEpochHoldsEachSampleOnce) {
  for (int64_t n : {1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097}) {
    const SampleOrder order(n, 42);
    for (int64_t epoch : {0, 1, 7}) {
      std::vector<bool> seen(n, false);
      for (int64_t sample : Epoch(order, n, epoch)) {
        ASSERT_GE(sample, 0);
        ASSERT_LT(sample, n);
        ASSERT_FALSE(seen[sample]) << "sample " << sample << " twice, n " << n;
        seen[sample] = true;
      }
    }
  }
}

TEST(SampleOrderTest, RanksAreDisjointAndTheirUnionIsTheEpochAtAnyWorldSize) {
  // Micro-batch j holds positions [j*mb, (j+1)*mb) and goes to rank j mod N (architecture, 5b).
  const int64_t n = 96, mb = 4;
  for (int world : {1, 2, 4}) {
    std::vector<int> taken(n, 0);
    std::vector<int64_t> global(n);
    for (int rank = 0; rank < world; ++rank) {
      const SampleOrder order(n, 7);  // each rank has its own
      for (int64_t j = rank; j < n / mb; j += world) {
        for (int64_t i = j * mb; i < (j + 1) * mb; ++i) {
          global[i] = order.At(i);
          ++taken[global[i]];
        }
      }
    }
    EXPECT_EQ(taken, std::vector<int>(n, 1)) << world;
    EXPECT_EQ(global, Epoch(SampleOrder(n, 7), n, 0)) << world;
  }
}

TEST(SampleOrderTest, EpochsAndSeedsDiffer) {
  const SampleOrder order(100, 1);
  EXPECT_NE(Epoch(order, 100, 0), Epoch(order, 100, 1));
  EXPECT_NE(Epoch(order, 100, 1), Epoch(order, 100, 2));
  EXPECT_NE(Epoch(order, 100, 0), Epoch(SampleOrder(100, 2), 100, 0));
}

TEST(SampleOrderTest, NeighboursAreScattered) {
  // Of a random permutation's n - 1 neighbouring pairs about 2 are neighbours in the data too.
  const int64_t n = 10000;
  const std::vector<int64_t> order = Epoch(SampleOrder(n, 3), n, 0);
  int neighbours = 0, fixed = 0;
  double distance = 0;
  for (int64_t i = 1; i < n; ++i) {
    if (std::abs(order[i] - order[i - 1]) == 1) ++neighbours;
    if (order[i] == i) ++fixed;
    distance += std::abs(order[i] - order[i - 1]);
  }
  EXPECT_LT(neighbours, 20);
  EXPECT_LT(fixed, 20);
  EXPECT_NEAR(distance / n, n / 3.0, n / 30.0);
}

TEST(SampleOrderTest, EveryFirstSampleIsAboutEquallyLikely) {
  // Over 5000 epochs of 5 samples each comes first 1000 times, standard deviation 28.
  const SampleOrder order(5, 11);
  std::vector<int> first(5, 0);
  for (int64_t epoch = 0; epoch < 5000; ++epoch) ++first[order.At(epoch * 5)];
  for (int count : first) EXPECT_NEAR(count, 1000, 150);
}

TEST(SampleOrderTest, HugeDataNeedsNoMemoryAndKeepsItsRange) {
  const int64_t n = (int64_t{1} << 40) + 1;
  const SampleOrder order(n, 5);
  std::set<int64_t> seen;
  for (int64_t i = 0; i < 1000; ++i) {
    const int64_t sample = order.At(n - 500 + i);  // across an epoch's end
    EXPECT_GE(sample, 0);
    EXPECT_LT(sample, n);
    seen.insert(sample);
  }
  EXPECT_GE(seen.size(), 999u);
}

}  // namespace
}  // namespace zeroshard
