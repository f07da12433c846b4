#include "common/plan/planner.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

// 7.5 B parameters on 64 ranks (Rajbhandari et al. 2020, figure 1).
TEST(ModelStateBytesTest, GivesThePublishedFigures) {
  EXPECT_NEAR(ModelStateBytes(7.5e9, 64, 0) / 1e9, 120.0, 0.05);
  EXPECT_NEAR(ModelStateBytes(7.5e9, 64, 1) / 1e9, 31.4, 0.05);
  EXPECT_NEAR(ModelStateBytes(7.5e9, 64, 2) / 1e9, 16.6, 0.05);
  EXPECT_NEAR(ModelStateBytes(7.5e9, 64, 3) / 1e9, 1.9, 0.05);
}

// Rows of a table of 10 columns that starts at element 64.
TEST(RowsTouchedTest, CountsRowsThatAreOwnedInPart) {
  const ElementRange table{64, 64 + 1000};
  EXPECT_EQ(RowsTouched(table, {64, 64}, 10), 0);
  EXPECT_EQ(RowsTouched(table, {64, 74}, 10), 1);
  EXPECT_EQ(RowsTouched(table, {64, 75}, 10), 2);
  EXPECT_EQ(RowsTouched(table, {73, 75}, 10), 2);
  EXPECT_EQ(RowsTouched(table, {128, 192}, 10), 7);  // elements 64 to 127: rows 6 to 12
  EXPECT_EQ(RowsTouched(table, table, 10), 100);
}

}  // namespace
}  // namespace zeroshard
