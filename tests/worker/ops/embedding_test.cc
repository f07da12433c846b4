#include <gtest/gtest.h>

#include <map>

#include "tests/worker/ops/vector_test_util.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard::cpu {
namespace {

constexpr int64_t kVocabulary = 50;

std::vector<int32_t> RandomTokens(int64_t n, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t& token : tokens) token = static_cast<int32_t>(generator() % kVocabulary);
  return tokens;
}

TEST(EmbeddingTest, ForwardAddsTokenAndPositionRows) {
  for (const int64_t cols : {1, 7, 64, 65, 1000}) {
    const int64_t batch = 3, seq = 20;
    const auto tokens = RandomTokens(batch * seq, 1);
    const Values tok_in = RandomValues(kVocabulary * cols, 2), pos_in = RandomValues(seq * cols, 3);
    for (const bool positions : {true, false}) {
      const auto run = [&](DType dtype, int threads, int skip) -> std::vector<Output> {
        Tensor tok(dtype, tok_in, skip), pos(dtype, pos_in, skip),
            y(dtype, batch * seq * cols, skip);
        EmbeddingForward(tokens.data(), tok.data(), positions ? pos.data() : nullptr, batch, seq,
                         cols, dtype, y.data(), threads);
        return {{y.values()}};
      };
      const Values actual = run(DType::kF32, 1, 0)[0].values;
      for (int64_t row = 0; row < batch * seq; ++row) {
        for (int64_t i = 0; i < cols; ++i) {
          double expected =
              tok_in[static_cast<size_t>(tokens[static_cast<size_t>(row)] * cols + i)];
          if (positions) expected += pos_in[static_cast<size_t>(row % seq * cols + i)];
          ASSERT_EQ(actual[static_cast<size_t>(row * cols + i)], static_cast<float>(expected));
        }
      }
      ExpectReproducible(run);
    }
  }
}

struct Rows {
  std::vector<int32_t> ids;
  Values values;
};

Rows BackwardRows(const Values& dy_in, const std::vector<int32_t>& tokens, int64_t batch,
                  int64_t seq, int64_t cols, DType dtype, int threads, int skip) {
  Tensor dy(dtype, dy_in, skip), rows(dtype, batch * seq * cols, skip);
  Rows result{std::vector<int32_t>(tokens.size(), 12345), {}};
  EmbeddingBackwardRows(dy.data(), tokens.data(), batch, seq, cols, dtype, result.ids.data(),
                        rows.data(), threads);
  result.values = rows.values();
  return result;
}

TEST(EmbeddingTest, BackwardGivesEachTokensSumInRisingOrderAndPadsTheRest) {
  for (const int64_t cols : {1, 7, 65, 300}) {
    const int64_t batch = 4, seq = 60;
    const auto tokens = RandomTokens(batch * seq, 4);
    const Values dy = RandomValues(batch * seq * cols, 5);
    std::map<int32_t, std::vector<float>> expected;  // fp32 sums in order of position
    for (size_t row = 0; row < tokens.size(); ++row) {
      auto& sums = expected[tokens[row]];
      sums.resize(static_cast<size_t>(cols));
      for (size_t i = 0; i < sums.size(); ++i) {
        sums[i] += static_cast<float>(dy[row * static_cast<size_t>(cols) + i]);
      }
    }
    const Rows actual = BackwardRows(dy, tokens, batch, seq, cols, DType::kF32, 1, 0);
    size_t row = 0;
    for (const auto& [token, sums] : expected) {
      EXPECT_EQ(actual.ids[row], token);
      for (size_t i = 0; i < sums.size(); ++i) {
        ASSERT_EQ(actual.values[row * static_cast<size_t>(cols) + i], sums[i]);
      }
      ++row;
    }
    ASSERT_LT(row, tokens.size());
    for (size_t i = row; i < tokens.size(); ++i) EXPECT_EQ(actual.ids[i], -1);
    for (size_t i = row * static_cast<size_t>(cols); i < actual.values.size(); ++i) {
      ASSERT_EQ(actual.values[i], 0);
    }
    ExpectReproducible([&](DType dtype, int threads, int skip) -> std::vector<Output> {
      const Rows rows = BackwardRows(dy, tokens, batch, seq, cols, dtype, threads, skip);
      EXPECT_EQ(rows.ids, actual.ids);
      return {{rows.values}};
    });
  }
}

TEST(EmbeddingTest, BackwardOfAllDifferentAndOfOneToken) {
  const Values dy = {1, 2, 3, 4, 5, 6};
  const Rows different = BackwardRows(dy, {9, 0, 3}, 1, 3, 2, DType::kF32, 1, 0);
  EXPECT_EQ(different.ids, (std::vector<int32_t>{0, 3, 9}));
  EXPECT_EQ(different.values, (Values{3, 4, 5, 6, 1, 2}));
  const Rows same = BackwardRows(dy, {7, 7, 7}, 1, 3, 2, DType::kF32, 1, 0);
  EXPECT_EQ(same.ids, (std::vector<int32_t>{7, -1, -1}));
  EXPECT_EQ(same.values, (Values{9, 12, 0, 0, 0, 0}));
}

}  // namespace
}  // namespace zeroshard::cpu
