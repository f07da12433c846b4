// Rows of a table by id: the CPU's bits.
#include "worker/ops/cuda/rows.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/worker/ops/cuda/launch_emulation.h"
#include "worker/ops/rows.h"

namespace zeroshard::cuda {
namespace {

using cpu::RandomValues;

// Distinct ids in rising order below `table_rows`, then -1.
std::vector<int32_t> Ids(int64_t count, int64_t used, int32_t table_rows, uint32_t seed) {
  std::vector<int32_t> all(static_cast<size_t>(table_rows));
  for (int32_t i = 0; i < table_rows; ++i) all[static_cast<size_t>(i)] = i;
  std::shuffle(all.begin(), all.end(), std::mt19937(seed));
  std::vector<int32_t> ids(all.begin(), all.begin() + used);
  std::sort(ids.begin(), ids.end());
  ids.resize(static_cast<size_t>(count), -1);
  return ids;
}

constexpr int32_t kTableRows = 40;

TEST(CudaRowsTest, ScatterAndAccumulateAreTheCpus) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    for (const int64_t cols : {1, 8, 13, 64}) {
      for (const int64_t used : {0, 5, 12}) {
        for (const bool aligned : {false, true}) {
          if (aligned && cols % kPack != 0) continue;
          const int64_t n = 12;
          const auto ids = Ids(n, used, kTableRows, 1);
          Array<T> rows(RandomValues(n * cols, 2)), table(RandomValues(kTableRows * cols, 3));
          Array<T> wanted = table;
          cpu::ScatterRows(ids.data(), rows.data(), n, cols, dtype, wanted.data(), 1);
          RunEach(ScatterRowsOp<T>{ids.data(), rows.data(), cols, table.data()}, n, cols, aligned);
          ExpectSameBits(table, wanted, "scattered");

          Array<float> sums(RandomValues(kTableRows * cols, 4)), wanted_sums = sums;
          cpu::AccumulateRows(ids.data(), rows.data(), n, cols, dtype, wanted_sums.data(), 1);
          RunEach(AccumulateRowsOp<T>{ids.data(), rows.data(), cols, sums.data()}, n, cols,
                  aligned);
          ExpectSameBits(sums, wanted_sums, "accumulated");
        }
      }
    }
  });
}

// A RowSums and its memory: of nothing.
class Sums {
 public:
  Sums(int64_t begin, int64_t end, int64_t cols, int64_t capacity)
      : slots_(static_cast<size_t>(CeilDiv(end, cols) - begin / cols), -1),
        touched_(static_cast<size_t>(capacity)),
        sums_(static_cast<size_t>(capacity * cols)) {
    view = {.begin = begin,
            .end = end,
            .cols = cols,
            .capacity = capacity,
            .slots = slots_.data(),
            .touched = touched_.data(),
            .count = &count_,
            .sums = sums_.data()};
  }
  Sums(const Sums&) = delete;

  RowSums view;

  bool IsOfNothing() const {
    const auto is = [](auto value) { return [value](auto seen) { return seen == value; }; };
    return count_ == 0 && std::ranges::all_of(slots_, is(-1)) && std::ranges::all_of(sums_, is(0));
  }

 private:
  std::vector<int32_t> slots_, touched_;
  std::vector<float> sums_;
  int32_t count_ = 0;
};

template <class T>
void Fold(const RowSums& sums, const std::vector<int32_t>& ids, const T* rows, bool aligned) {
  const auto n = static_cast<int64_t>(ids.size());
  RunEach(OneByOne{AssignSlotsOp{sums, ids.data()}}, 1, n, false);
  RunEach(FoldRowsOp<T>{sums, ids.data(), rows}, n, sums.cols, aligned);
}

void Clear(const RowSums& sums, bool aligned) {
  RunEach(ClearRowsOp{sums}, sums.capacity, sums.cols, aligned);
  *sums.count = 0;
}

struct Range {
  int64_t begin, end, cols;
};

// Whole rows, parts of rows at both ends, part of one row only, and nothing but the table's end.
const Range kRanges[] = {{0, 40 * 16, 16}, {8, 328, 16}, {24, 32, 16},
                         {0, 40 * 5, 5},   {3, 122, 5},  {7, 9, 5}};

template <class T, class G>
void FoldAndJoin(DType wire, DType gradient_type, const Range& range, bool aligned) {
  const auto [begin, end, cols] = range;
  const int64_t capacity = CeilDiv(end, cols) - begin / cols;
  Sums seen(begin, end, cols, capacity), wanted(begin, end, cols, capacity);
  for (uint32_t step = 0; step < 2; ++step) {
    for (uint32_t contributor = 0; contributor < 4; ++contributor) {
      const int64_t n = 30, used = contributor == 2 ? 0 : 25;
      const auto ids = Ids(n, used, kTableRows, 10 * step + contributor);
      Array<T> rows(RandomValues(n * cols, 50 + contributor));
      cpu::FoldRows(wanted.view, ids.data(), rows.data(), n, Element<T>::kType, 1);
      Fold(seen.view, ids, rows.data(), aligned);
    }
    ASSERT_EQ(*seen.view.count, *wanted.view.count);
    Array<G> gradient(RandomValues(end - begin, 60)), wanted_gradient = gradient;
    cpu::JoinRows(wanted.view, wire, wanted_gradient.data(), gradient_type, 1);
    RunEach(JoinRowsOp<G>{seen.view, wire, gradient.data()}, capacity, cols, aligned);
    ExpectSameBits(gradient, wanted_gradient, "gradient");
    cpu::ClearRows(wanted.view);
    Clear(seen.view, aligned);
    ASSERT_TRUE(seen.IsOfNothing());
  }
}

TEST(CudaRowsTest, SumsOfSeveralContributorsAreTheCpus) {
  ForEachType([](auto element, DType) {
    ForEachType([&](auto gradient, DType gradient_type) {
      for (const DType wire : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const Range& range : kRanges) {
          for (const bool aligned : {false, true}) {
            if (aligned && range.cols % kPack != 0) continue;
            FoldAndJoin<decltype(element), decltype(gradient)>(wire, gradient_type, range, aligned);
          }
        }
      }
    });
  });
}

TEST(CudaRowsDeathTest, MoreRowsThanThereIsRoomForEndTheProgram) {
  Sums sums(0, 40 * 8, 8, 2);
  const std::vector<int32_t> ids = {1, 5, 9};
  EXPECT_DEATH(RunEach(OneByOne{AssignSlotsOp{sums.view, ids.data()}}, 1, 3, false), "");
}

}  // namespace
}  // namespace zeroshard::cuda
