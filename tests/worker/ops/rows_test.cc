// Ops::ScatterRows and AccumulateRows; FoldRows, JoinRows and ClearRows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>

#include "tests/worker/ops/vector_test_util.h"
#include "worker/ops/ops.h"

namespace zeroshard::cpu {
namespace {

constexpr int32_t kGuard = 987654;

// Numbers of many magnitudes, so that the order of a sum shows in its last bits.
Values WideValues(int64_t size, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> exponent(-12, 12);
  Values values(static_cast<size_t>(size));
  for (double& value : values) {
    value = static_cast<float>(normal(generator) * std::exp2(exponent(generator)));
  }
  return values;
}

// A micro-batch's rows: ids in rising order, padded with -1, and values also where padding is.
struct Contribution {
  std::vector<int32_t> ids;
  Tensor rows;
  int64_t slots() const { return static_cast<int64_t>(ids.size()); }
};

Contribution Contribute(const std::vector<int32_t>& ids, int64_t slots, int64_t cols, DType dtype,
                        uint32_t seed) {
  Contribution c{ids, Tensor(dtype, WideValues(slots * cols, seed), static_cast<int>(seed % 4))};
  c.ids.resize(static_cast<size_t>(slots), -1);
  return c;
}

std::vector<int32_t> SomeRows(int64_t table_rows, int64_t count, uint32_t seed) {
  std::vector<int32_t> ids(static_cast<size_t>(table_rows));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
  ids.resize(static_cast<size_t>(count));
  std::sort(ids.begin(), ids.end());
  return ids;
}

// All rows, some, one and none of them.
std::vector<Contribution> Contributions(int64_t table_rows, int64_t cols, DType dtype) {
  std::vector<Contribution> all;
  uint32_t seed = 0;
  for (const int64_t count : {table_rows / 2, int64_t{0}, table_rows, int64_t{1}, table_rows / 3}) {
    const int64_t slots = std::max(count, table_rows / 2);
    all.push_back(Contribute(SomeRows(table_rows, count, seed), slots, cols, dtype, seed));
    ++seed;
  }
  return all;
}

// The memory of RowSums: as a device gives it but for the sums, which hold anything, and a guard
// after each array.
class Accumulators {
 public:
  Accumulators(int64_t begin, int64_t end, int64_t cols, int64_t capacity)
      : slots_(static_cast<size_t>(end > begin ? CeilDiv(end, cols) - begin / cols : 0) + 1, -1),
        touched_(static_cast<size_t>(capacity) + 1),
        sums_(static_cast<size_t>(capacity * cols) + 1, std::nanf("")) {
    slots_.back() = touched_.back() = kGuard;
    sums_.back() = kGuard;
    view_ = {begin, end, cols, capacity, slots_.data(), touched_.data(), &count_, sums_.data()};
  }
  Accumulators(const Accumulators&) = delete;

  const RowSums& view() const { return view_; }
  // The rows in use, in rising order; checks that each has the slot that names it.
  std::vector<int32_t> Rows() const {
    std::vector<int32_t> rows(touched_.begin(), touched_.begin() + count_);
    for (int32_t slot = 0; slot < count_; ++slot) {
      EXPECT_EQ(slots_[static_cast<size_t>(touched_[static_cast<size_t>(slot)] -
                                           view_.begin / view_.cols)],
                slot);
    }
    EXPECT_EQ(std::count(slots_.begin(), slots_.end(), -1),
              static_cast<int64_t>(slots_.size()) - 1 - count_);
    EXPECT_EQ(slots_.back(), kGuard);
    EXPECT_EQ(touched_.back(), kGuard);
    EXPECT_EQ(sums_.back(), kGuard);
    std::sort(rows.begin(), rows.end());
    return rows;
  }

 private:
  std::vector<int32_t> slots_, touched_;
  int32_t count_ = 0;
  std::vector<float> sums_;
  RowSums view_;
};

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Of an owned range: its elements' sums, and which of them a contribution has touched.
struct Sums {
  std::vector<float> values;
  std::vector<bool> touched;
  std::vector<int32_t> rows;  // that were touched, in rising order
};

// Element by element, one contribution after the other.
Sums ExpectedSums(const std::vector<Contribution>& all, Range owned, int64_t cols) {
  const auto size = static_cast<size_t>(owned.size());
  Sums sums{std::vector<float>(size), std::vector<bool>(size), {}};
  std::set<int32_t> rows;
  for (const Contribution& c : all) {
    const Values values = c.rows.values();
    for (size_t i = 0; i < c.ids.size() && c.ids[i] >= 0; ++i) {
      for (int64_t col = 0; col < cols; ++col) {
        const int64_t element = c.ids[i] * cols + col;
        if (element < owned.begin || element >= owned.end) continue;
        const auto at = static_cast<size_t>(element - owned.begin);
        sums.values[at] +=
            static_cast<float>(values[i * static_cast<size_t>(cols) + static_cast<size_t>(col)]);
        sums.touched[at] = true;
        rows.insert(c.ids[i]);
      }
    }
  }
  sums.rows.assign(rows.begin(), rows.end());
  return sums;
}

Values Joined(Values gradient, const Sums& sums, DType wire) {
  const auto round = [wire](float value) {
    return wire == DType::kBF16 ? static_cast<float>(RoundToBf16(value)) : value;
  };
  for (size_t i = 0; i < gradient.size(); ++i) {
    if (sums.touched[i])
      gradient[i] = round(static_cast<float>(gradient[i]) + round(sums.values[i]));
  }
  return gradient;
}

// Of a table of `rows`: all, whole rows, parts at both ends, parts of one row, nothing.
std::vector<Range> OwnedRanges(int64_t rows, int64_t cols) {
  const int64_t some = 5 * cols, part = cols / 2, most = (rows - 4) * cols;
  return {{0, rows * cols},           {some, most},
          {some + part, most + part}, {some + part, most},
          {some, most + part},        {some + cols / 3, some + cols / 3 + CeilDiv(cols, 2)},
          {some + part, some + part}};
}

// For each number of threads and type of gradient.
void ExpectFoldedAndJoined(Range owned, int64_t cols, const std::vector<Contribution>& all,
                           DType wire) {
  SCOPED_TRACE(testing::Message() << "[" << owned.begin << ", " << owned.end << ") of rows of "
                                  << cols);
  const Sums sums = ExpectedSums(all, owned, cols);
  Tensor before(wire, WideValues(owned.size(), 77));
  const Values expected = Joined(before.values(), sums, wire);
  for (const int threads : {1, 2, 3}) {
    const std::unique_ptr<Ops> ops = MakeCpuOps(threads);
    Accumulators accumulators(owned.begin, owned.end, cols, static_cast<int64_t>(sums.rows.size()));
    for (const Contribution& c : all) {
      ops->FoldRows(accumulators.view(), c.ids.data(), c.rows.data(), c.slots(), wire);
    }
    EXPECT_EQ(accumulators.Rows(), sums.rows);
    for (const DType gradient_type : {DType::kF32, wire}) {
      Tensor gradient(gradient_type, before.values(), threads);
      ops->JoinRows(accumulators.view(), wire, gradient.data(), gradient_type);
      EXPECT_EQ(gradient.values(), expected) << threads << " threads";
    }
  }
}

// With no slot more than the rows that are touched.
TEST(RowSumsTest, TheOwnedPartsOfRowsAreSummedInOrderAndJoinTheGradient) {
  struct Table {
    int64_t rows, cols;
  };
  // The last is shared by three threads.
  for (const Table table : {Table{20, 1}, {20, 7}, {20, 64}, {12, 300}, {64, 1000}}) {
    for (const DType wire : {DType::kF32, DType::kBF16}) {
      const std::vector<Contribution> all = Contributions(table.rows, table.cols, wire);
      for (const Range owned : OwnedRanges(table.rows, table.cols)) {
        ExpectFoldedAndJoined(owned, table.cols, all, wire);
      }
    }
  }
}

TEST(RowSumsTest, EveryInstructionSetGivesTheSame) {
  const std::vector<Contribution> all = Contributions(20, 65, DType::kBF16);
  ForEachTarget([&](const std::string& target) {
    SCOPED_TRACE(target);
    ExpectFoldedAndJoined({5 * 65 + 3, 17 * 65 + 9}, 65, all, DType::kBF16);
  });
}

// 2^24 + 1 is no fp32 and falls back to 2^24; the ones count where they come first.
TEST(RowSumsTest, ContributionsAreAddedInTheOrderTheyCome) {
  const std::unique_ptr<Ops> ops = MakeCpuOps(1);
  const int32_t id = 3;
  const auto sum = [&](const Values& contributions) {
    Accumulators accumulators(3, 4, 1, 1);
    for (const double value : contributions) {
      Tensor row(DType::kF32, Values{value});
      ops->FoldRows(accumulators.view(), &id, row.data(), 1, DType::kF32);
    }
    Tensor gradient(DType::kF32, Values{0});
    ops->JoinRows(accumulators.view(), DType::kF32, gradient.data(), DType::kF32);
    return gradient.values()[0];
  };
  EXPECT_EQ(sum({16777216, 1, 1}), 16777216);
  EXPECT_EQ(sum({1, 1, 16777216}), 16777218);
}

// Both are -0, but a sum begins at 0; and 0 + -0 is 0.
TEST(RowSumsTest, ASumBeginsAtPositiveZero) {
  const std::unique_ptr<Ops> ops = MakeCpuOps(1);
  const int32_t id = 0;
  Tensor row(DType::kF32, {-0.0, -0.0}), gradient(DType::kF32, {-0.0, -0.0});
  Accumulators accumulators(0, 1, 2, 1);
  ops->FoldRows(accumulators.view(), &id, row.data(), 1, DType::kF32);
  ops->JoinRows(accumulators.view(), DType::kF32, gradient.data(), DType::kF32);
  EXPECT_FALSE(std::signbit(gradient.values()[0]));
}

TEST(RowSumsTest, IsUsedAgainAfterClearRows) {
  const int64_t cols = 9, rows = 30;
  const Range owned = {2 * cols + 4, 25 * cols + 5};
  Accumulators accumulators(owned.begin, owned.end, cols, 12);
  const std::unique_ptr<Ops> ops = MakeCpuOps(2);
  for (const uint32_t step : {1, 2, 3}) {
    std::vector<Contribution> all;
    all.push_back(Contribute(SomeRows(rows, 6, step), 8, cols, DType::kF32, step));
    all.push_back(Contribute(SomeRows(rows, 6, step + 9), 6, cols, DType::kF32, step + 9));
    for (const Contribution& c : all) {
      ops->FoldRows(accumulators.view(), c.ids.data(), c.rows.data(), c.slots(), DType::kF32);
    }
    const Sums sums = ExpectedSums(all, owned, cols);
    EXPECT_EQ(accumulators.Rows(), sums.rows);
    const Values before = WideValues(owned.size(), 50 + step);
    Tensor gradient(DType::kF32, before);
    ops->JoinRows(accumulators.view(), DType::kF32, gradient.data(), DType::kF32);
    EXPECT_EQ(gradient.values(), Joined(before, sums, DType::kF32));
    ops->ClearRows(accumulators.view());
    EXPECT_EQ(accumulators.Rows(), std::vector<int32_t>{});
    ops->JoinRows(accumulators.view(), DType::kF32, gradient.data(), DType::kF32);
    EXPECT_EQ(gradient.values(), Joined(before, sums, DType::kF32));
  }
}

TEST(RowSumsTest, ARankThatOwnsNothingNeedsNoMemory) {
  const std::unique_ptr<Ops> ops = MakeCpuOps(2);
  Contribution c = Contribute({0, 1, 5}, 4, 8, DType::kBF16, 1);
  RowSums nothing;
  nothing.begin = nothing.end = 12;
  nothing.cols = 8;
  ops->FoldRows(nothing, c.ids.data(), c.rows.data(), c.slots(), DType::kBF16);
  ops->JoinRows(nothing, DType::kBF16, nullptr, DType::kF32);
  ops->ClearRows(nothing);
  ops->FoldRows(RowSums(), c.ids.data(), c.rows.data(), c.slots(), DType::kBF16);
}

// table[id] = or += the rows in front of the padding, and nothing else.
Values ExpectedTable(Values table, const Contribution& c, int64_t cols, bool add) {
  const Values rows = c.rows.values();
  for (size_t i = 0; i < c.ids.size() && c.ids[i] >= 0; ++i) {
    for (size_t col = 0; col < static_cast<size_t>(cols); ++col) {
      double& element = table[static_cast<size_t>(c.ids[i] * cols) + col];
      const double value = rows[i * static_cast<size_t>(cols) + col];
      element = add ? static_cast<float>(element) + static_cast<float>(value) : value;
    }
  }
  return table;
}

TEST(TableRowsTest, AreWrittenOrAddedWhereTheirIdsSay) {
  for (const int64_t cols : {1, 7, 64, 65, 1000}) {
    const int64_t table_rows = 64;
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Contribution& c : Contributions(table_rows, cols, dtype)) {
        for (const int threads : {1, 2, 3}) {
          const std::unique_ptr<Ops> ops = MakeCpuOps(threads);
          const Values table_in = RandomValues(table_rows * cols, 8);
          Tensor table(dtype, table_in, threads), sums(DType::kF32, table_in, threads);
          ops->ScatterRows(c.ids.data(), c.rows.data(), c.slots(), cols, dtype, table.data());
          EXPECT_EQ(table.values(), ExpectedTable(table_in, c, cols, /*add=*/false));
          ops->AccumulateRows(c.ids.data(), c.rows.data(), c.slots(), cols, dtype, sums.floats());
          EXPECT_EQ(sums.values(), ExpectedTable(table_in, c, cols, /*add=*/true));
        }
      }
    }
  }
}

TEST(TableRowsTest, OfNoRowsChangeNothing) {
  const std::unique_ptr<Ops> ops = MakeCpuOps(2);
  Tensor table(DType::kF32, {1, 2, 3, 4});
  ops->ScatterRows(nullptr, nullptr, 0, 2, DType::kF32, table.data());
  ops->AccumulateRows(nullptr, nullptr, 0, 2, DType::kF32, table.floats());
  EXPECT_EQ(table.values(), (Values{1, 2, 3, 4}));
}

}  // namespace
}  // namespace zeroshard::cpu
