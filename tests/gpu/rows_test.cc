// The rows of tables, sums that several ranks must agree on, and copies on a GPU: the CPU's bits.
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/gpu/comparison.h"

namespace zeroshard {
namespace {

class GpuRows : public ComparisonFixture, public testing::WithParamInterface<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, GpuRows, testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

// Few distinct ones, so that most come several times.
std::vector<int32_t> Tokens(int64_t count, int32_t vocab) {
  std::mt19937 random(7);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i)
    tokens.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(vocab)));
  return tokens;
}

TEST_P(GpuRows, EmbeddingHasTheCpusBits) {
  const DType type = GetParam();
  constexpr int32_t kVocab = 211;
  for (const int64_t cols : {1, 63, 768}) {
    for (const int64_t seq : {1, 37, 200}) {
      SCOPED_TRACE(testing::Message() << seq << " x " << cols);
      const int64_t batch = 3, count = batch * seq;
      Arrays arrays;
      const int tokens = arrays.In(Tokens(count, kVocab));
      const int table = arrays.In(TypedValues::Random(kVocab * cols, type, 1));
      const int positions = arrays.In(TypedValues::Random(seq * cols, type, 2));
      const int dy = arrays.In(TypedValues::Random(count * cols, type, 3));
      const int y = arrays.Out(count * cols, type, kSameBits);
      const int alone = arrays.Out(count * cols, type, kSameBits);
      const int ids = arrays.Out(count, DType::kI32, kSameBits);
      const int rows = arrays.Out(count * cols, type, kSameBits);
      const int d_positions = arrays.Out(seq * cols, type, kSameBits);
      Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
        const auto* t = static_cast<const int32_t*>(p[tokens]);
        ops->EmbeddingForward(t, p[table], p[positions], batch, seq, cols, type, p[y]);
        ops->EmbeddingForward(t, p[table], nullptr, batch, seq, cols, type, p[alone]);
        ops->EmbeddingBackwardRows(p[dy], t, batch, seq, cols, type, static_cast<int32_t*>(p[ids]),
                                   p[rows]);
        ops->PositionBackward(p[dy], batch, seq, cols, type, p[d_positions]);
      });
    }
  }
}

// Every third token is another rank's; or all are.
TEST_P(GpuRows, APartOfATableHasTheCpusBits) {
  const DType type = GetParam();
  constexpr int32_t kRows = 70;
  for (const int64_t cols : {1, 63, 768}) {
    for (const size_t step : {3, 1}) {
      SCOPED_TRACE(testing::Message() << cols << " columns, another rank's by " << step);
      constexpr int64_t kBatch = 3, kSeq = 100, kCount = kBatch * kSeq;
      std::vector<int32_t> of_rank = Tokens(kCount, kRows);
      for (size_t i = 0; i < of_rank.size(); i += step) of_rank[i] = -1;
      Arrays arrays;
      const int local = arrays.In(of_rank);
      const int table = arrays.In(TypedValues::Random(kRows * cols, type, 1));
      const int dy = arrays.In(TypedValues::Random(kCount * cols, type, 3));
      const int y = arrays.Out(kCount * cols, type, kSameBits);
      const int ids = arrays.Out(kCount, DType::kI32, kSameBits);
      const int rows = arrays.Out(kCount * cols, type, kSameBits);
      Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
        const auto* t = static_cast<const int32_t*>(p[local]);
        EXPECT_TRUE(ops->LookupRows(t, p[table], kCount, cols, type, p[y]).ok());
        ops->EmbeddingBackwardRows(p[dy], t, kBatch, kSeq, cols, type,
                                   static_cast<int32_t*>(p[ids]), p[rows]);
      });
    }
  }
}

std::vector<int32_t> Rising(int32_t table_rows, int32_t step, size_t length) {
  std::vector<int32_t> ids;
  for (int32_t row = 0; row < table_rows; row += step) ids.push_back(row);
  ids.resize(length, -1);
  return ids;
}

TEST_P(GpuRows, TablesRowsHaveTheCpusBits) {
  const DType type = GetParam();
  constexpr int32_t kRows = 97;
  for (const int64_t cols : {1, 65, 768}) {
    for (const int32_t step : {1, 3, 96}) {
      Arrays arrays;
      const int ids = arrays.In(Rising(kRows, step, kRows));
      const int rows = arrays.In(TypedValues::Random(kRows * cols, type, 11));
      const int table = arrays.InOut(TypedValues::Random(kRows * cols, type, 12), kSameBits);
      const int sums = arrays.InOut(TypedValues::Random(kRows * cols, DType::kF32, 13), kSameBits);
      Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
        const auto* i = static_cast<const int32_t*>(p[ids]);
        ops->ScatterRows(i, p[rows], kRows, cols, type, p[table]);
        ops->AccumulateRows(i, p[rows], kRows, cols, type, static_cast<float*>(p[sums]));
      });
    }
  }
}

// Which row has which slot is not the CPU's; the sums that come of it, and nothing left, are.
TEST_P(GpuRows, FoldedRowsJoinAsTheCpusAndLeaveNothing) {
  const DType wire = GetParam();
  constexpr int32_t kRows = 97;
  constexpr int64_t kCols = 70;
  struct Range {
    int64_t begin, end;
  };
  for (const auto& [begin, end] : {Range{0, kRows * kCols},
                                   {13 * kCols + 5, 71 * kCols - 3},
                                   {20 * kCols + 1, 20 * kCols + 9}}) {
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      const int64_t first = begin / kCols, last = (end + kCols - 1) / kCols;
      Arrays arrays;
      const int some = arrays.In(Rising(kRows, 3, kRows)), more = arrays.In(Rising(kRows, 2, 60));
      const int rows = arrays.In(TypedValues::Random(kRows * kCols, wire, 21));
      const int gradient = arrays.InOut(TypedValues::Random(end - begin, type, 22), kSameBits);
      const int slots = arrays.InOut(std::vector<int32_t>(static_cast<size_t>(last - first), -1));
      const int touched = arrays.InOut(std::vector<int32_t>(static_cast<size_t>(last - first)));
      const int count = arrays.InOut(std::vector<int32_t>{0});
      const int sums =
          arrays.InOut(std::vector<float>(static_cast<size_t>((last - first) * kCols)));
      Compare(arrays, [&, begin = begin, end = end](Ops* ops, const std::vector<void*>& p) {
        const RowSums folded{.begin = begin,
                             .end = end,
                             .cols = kCols,
                             .capacity = last - first,
                             .slots = static_cast<int32_t*>(p[slots]),
                             .touched = static_cast<int32_t*>(p[touched]),
                             .count = static_cast<int32_t*>(p[count]),
                             .sums = static_cast<float*>(p[sums])};
        ops->FoldRows(folded, static_cast<const int32_t*>(p[some]), p[rows], kRows, wire);
        ops->FoldRows(folded, static_cast<const int32_t*>(p[more]), p[rows], 49, wire);
        ops->JoinRows(folded, wire, p[gradient], type);
        ops->ClearRows(folded);
        // Free slots may hold anything; which row had which is the device's own affair.
        ops->Zero(p[touched], static_cast<size_t>(last - first) * sizeof(int32_t));
        ops->Zero(p[sums], static_cast<size_t>((last - first) * kCols) * sizeof(float));
      });
    }
  }
}

TEST_P(GpuRows, TheSumOfSquaresHasTheCpusBits) {
  const DType type = GetParam();
  for (const int64_t n : {1, 63, 64, 1000, 1 << 20}) {
    auto values = TypedValues::Random(n, type, 31, 1e3f);
    for (const bool infinite : {false, true}) {
      if (infinite) values.Set(n / 2, std::numeric_limits<float>::infinity());
      Arrays arrays;
      const int x = arrays.In(values);
      const int acc = arrays.InOut(std::vector<NormAccumulator>(1));
      Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
        for (int times = 0; times < 3; ++times)
          ops->AddSquares(p[x], n, type, static_cast<NormAccumulator*>(p[acc]));
      });
    }
  }
}

TEST_P(GpuRows, CopiesMoveWhatTheyAreToldTo) {
  const DType type = GetParam();
  constexpr int64_t kCount = 10007;
  const auto size = static_cast<int64_t>(SizeOf(type));
  Arrays arrays;
  const int from = arrays.In(TypedValues::Random(kCount, type, 41));
  const int copy = arrays.Out(kCount, type, kSameBits);
  const int zeros = arrays.InOut(TypedValues::Random(kCount, type, 42), kSameBits);
  const int rows = arrays.InOut(TypedValues::Random(kCount, type, 43), kSameBits);
  Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
    ops->Copy(p[copy], p[from], static_cast<size_t>(kCount * size));
    ops->Zero(static_cast<char*>(p[zeros]) + size, static_cast<size_t>((kCount - 3) * size));
    ops->CopyRows(p[rows], 131 * size, p[from], 97 * size, 70, 61 * size);
  });
}

}  // namespace
}  // namespace zeroshard
