// Which tiles a block walks over, which block has which tile, where chunks lie: against every pair,
// one by one.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "worker/ops/cuda/attention_params.h"
#include "worker/ops/cuda/attention_plan.h"
#include "worker/ops/cuda/attention_tile.h"

namespace zeroshard::cuda::attention {
namespace {

// Starts of documents of 1, 2, ... tokens, each `step` longer than the last.
std::vector<int32_t> Starts(int seq, int first, int step) {
  std::vector<int32_t> starts;
  int start = 0, end = first, length = first;
  for (int t = 0; t < seq; ++t) {
    if (t == end) {
      start = end;
      length += step;
      end += length;
    }
    starts.push_back(start);
  }
  return starts;
}

struct Case {
  int seq, query_tile, key_tile;
  std::vector<int32_t> starts;
  const int32_t* data() const { return starts.empty() ? nullptr : starts.data(); }
  bool Sees(int query, int key) const { return Visible(query, StartOf(data(), query), key); }
};
const std::vector<Case>& Cases() {
  static const std::vector<Case> cases = {
      {1, 16, 32, {}},
      {100, 64, 64, {}},
      {100, 128, 64, {}},
      {150, 64, 32, {}},
      {100, 64, 64, Starts(100, 1, 1)},
      {300, 64, 32, Starts(300, 100, 20)},
      {300, 16, 32, Starts(300, 3, 0)},
      {257, 128, 64, Starts(257, 130, 0)},
      {90, 32, 16, Starts(90, 45, 0)},
  };
  return cases;
}

TEST(AttentionTiles, OfKeysAreThoseWithAVisiblePair) {
  for (const Case& c : Cases()) {
    for (int first = 0; first < c.seq; first += c.query_tile) {
      const int end = std::min(first + c.query_tile, c.seq);
      std::set<int> wanted;
      for (int query = first; query < end; ++query) {
        for (int key = 0; key < c.seq; ++key) {
          if (c.Sees(query, key)) wanted.insert(key / c.key_tile);
        }
      }
      const TileRange tiles = KeyTiles(c.data(), first, end, c.key_tile);
      EXPECT_EQ(tiles.begin, *wanted.begin()) << c.seq << " " << first;
      EXPECT_EQ(tiles.end, *wanted.rbegin() + 1) << c.seq << " " << first;
    }
  }
}

TEST(AttentionTiles, OfQueriesAreThoseWithAVisiblePair) {
  for (const Case& c : Cases()) {
    for (int first = 0; first < c.seq; first += c.key_tile) {
      const int end = std::min(first + c.key_tile, c.seq);
      std::set<int> wanted;
      for (int key = first; key < end; ++key) {
        for (int query = 0; query < c.seq; ++query) {
          if (c.Sees(query, key)) wanted.insert(query / c.query_tile);
        }
      }
      const TileRange tiles = QueryTiles(c.data(), c.seq, first, end, c.query_tile);
      EXPECT_EQ(tiles.begin, *wanted.begin()) << c.seq << " " << first;
      EXPECT_EQ(tiles.end, *wanted.rbegin() + 1) << c.seq << " " << first;
    }
  }
}

TEST(AttentionTiles, AreMaskedWhereAPairIsHidden) {
  int hidden_tiles = 0, open_tiles = 0;
  for (const Case& c : Cases()) {
    for (int first = 0; first < c.seq; first += c.query_tile) {
      const int end = std::min(first + c.query_tile, c.seq);
      for (int key = 0; key < end; key += c.key_tile) {
        bool hides = false;
        for (int i = first; i < end; ++i) {
          for (int j = key; j < key + c.key_tile; ++j) hides = hides || !c.Sees(i, j);
        }
        EXPECT_EQ(HasHiddenPair(c.data(), first, end, key, key + c.key_tile), hides);
        ++(hides ? hidden_tiles : open_tiles);
      }
    }
  }
  EXPECT_GT(hidden_tiles, 0);
  EXPECT_GT(open_tiles, 0);
}

TEST(AttentionTiles, AreEachOneBlocks) {
  Params p;
  p.batch = 3;
  p.seq = 200;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 8;
  std::set<std::tuple<int, int, int>> queries, keys;
  for (int64_t block = 0; block < QueryBlocks(p, 64); ++block) {
    const Task task = QueryTask(block, Tiles(p.seq, 64), p.heads, p.batch);
    queries.emplace(task.sample, task.head, task.tile);
  }
  for (int64_t block = 0; block < KeyBlocks(p, 64); ++block) {
    const Task task = KeyTask(block, p.kv_heads, p.batch);
    keys.emplace(task.sample, task.head, task.tile);
  }
  EXPECT_EQ(queries.size(), size_t{3 * 4 * 4});
  EXPECT_EQ(*queries.begin(), std::tuple(0, 0, 0));
  EXPECT_EQ(*queries.rbegin(), std::tuple(2, 3, 3));
  EXPECT_EQ(keys.size(), size_t{3 * 2 * 4});
  EXPECT_EQ(*keys.begin(), std::tuple(0, 0, 0));
  EXPECT_EQ(*keys.rbegin(), std::tuple(2, 1, 3));
}

template <int D>
void ExpectChunksApart() {
  std::set<int> places;
  for (int row = 0; row < 64; ++row) {
    for (int chunk = 0; chunk < D / 8; ++chunk) {
      const int element = ElementOfChunk<D>(row, chunk);
      EXPECT_EQ(element / D, row);
      EXPECT_EQ(element % 8, 0);
      places.insert(element);
    }
  }
  EXPECT_EQ(places.size(), size_t{64 * D / 8});
}
TEST(AttentionTiles, HaveAPlaceForEveryChunk) {
  ExpectChunksApart<32>();
  ExpectChunksApart<64>();
  ExpectChunksApart<128>();
}

TEST(AttentionPath, IsTensorCoresOnlyForAligned16Bits) {
  alignas(16) static char memory[64];
  const AttentionArgs fits{.q = memory,
                           .k = memory,
                           .v = memory,
                           .ld_q = 128,
                           .ld_k = 128,
                           .ld_v = 128,
                           .batch = 1,
                           .seq = 1,
                           .heads = 2,
                           .kv_heads = 2,
                           .head_dim = 64,
                           .dtype = DType::kBF16,
                           .dropout = {}};
  EXPECT_EQ(ChoosePath(fits, {memory}), Path::kTensorCores);
  EXPECT_EQ(ChoosePath(fits, {memory, memory + 8}), Path::kPlain);
  AttentionArgs args = fits;
  args.dtype = DType::kF16;
  EXPECT_EQ(ChoosePath(args, {memory}), Path::kTensorCores);
  args.dtype = DType::kF32;
  EXPECT_EQ(ChoosePath(args, {memory}), Path::kPlain);
  args = fits;
  args.head_dim = 12;
  EXPECT_EQ(ChoosePath(args, {memory}), Path::kPlain);
  args = fits;
  args.head_dim = 136;
  EXPECT_EQ(ChoosePath(args, {memory}), Path::kPlain);
  args = fits;
  args.ld_k = 132;
  EXPECT_EQ(ChoosePath(args, {memory}), Path::kPlain);
}

}  // namespace
}  // namespace zeroshard::cuda::attention
