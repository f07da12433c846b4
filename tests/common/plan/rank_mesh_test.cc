#include "common/plan/rank_mesh.h"

#include <algorithm>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr MeshDimension kDimensions[] = {MeshDimension::kPipeline, MeshDimension::kData,
                                         MeshDimension::kTensor};

std::vector<MeshShape> ShapesUpTo(int most) {
  std::vector<MeshShape> shapes;
  for (int p = 1; p <= most; ++p) {
    for (int d = 1; d <= most; ++d) {
      for (int t = 1; t <= most; ++t) shapes.push_back({.pipeline = p, .data = d, .tensor = t});
    }
  }
  return shapes;
}

// Written out by hand: pipeline 2 x data 2 x tensor 2.
TEST(RankMesh, TensorRanksAreNeighboursAndStagesFarthestApart) {
  const MeshShape shape{.pipeline = 2, .data = 2, .tensor = 2};
  EXPECT_EQ(PositionOf(shape, 5), (MeshPosition{.pipeline = 1, .data = 0, .tensor = 1}));
  EXPECT_THAT(LineOf(shape, MeshDimension::kTensor, 5), ElementsAre(4, 5));
  EXPECT_THAT(LineOf(shape, MeshDimension::kData, 5), ElementsAre(5, 7));
  EXPECT_THAT(LineOf(shape, MeshDimension::kPipeline, 5), ElementsAre(1, 5));
  EXPECT_THAT(
      LinesOf(shape, MeshDimension::kTensor),
      ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4, 5), ElementsAre(6, 7)));
  EXPECT_THAT(
      LinesOf(shape, MeshDimension::kData),
      ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3), ElementsAre(4, 6), ElementsAre(5, 7)));
  EXPECT_THAT(
      LinesOf(shape, MeshDimension::kPipeline),
      ElementsAre(ElementsAre(0, 4), ElementsAre(1, 5), ElementsAre(2, 6), ElementsAre(3, 7)));
}

TEST(RankMesh, RanksAndPositionsAreEachOthersInverse) {
  for (const MeshShape& shape : ShapesUpTo(4)) {
    std::set<int> seen;
    for (int p = 0; p < shape.pipeline; ++p) {
      for (int d = 0; d < shape.data; ++d) {
        for (int t = 0; t < shape.tensor; ++t) {
          const MeshPosition position{.pipeline = p, .data = d, .tensor = t};
          const int rank = RankAt(shape, position);
          EXPECT_EQ(PositionOf(shape, rank), position);
          EXPECT_TRUE(seen.insert(rank).second);
        }
      }
    }
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), shape.Ranks() - 1);
  }
}

TEST(RankMesh, EachRankIsInOneLineOfEachDimensionAtItsIndex) {
  for (const MeshShape& shape : ShapesUpTo(4)) {
    for (const MeshDimension dimension : kDimensions) {
      std::vector<int> times(static_cast<size_t>(shape.Ranks()), 0);
      for (const std::vector<int>& line : LinesOf(shape, dimension)) {
        for (size_t i = 0; i < line.size(); ++i) {
          ++times[static_cast<size_t>(line[i])];
          EXPECT_EQ(LineOf(shape, dimension, line[i]), line);
          const MeshPosition at = PositionOf(shape, line[i]);
          const int index = dimension == MeshDimension::kPipeline ? at.pipeline
                            : dimension == MeshDimension::kData   ? at.data
                                                                  : at.tensor;
          EXPECT_EQ(index, static_cast<int>(i));
        }
      }
      EXPECT_EQ(std::count(times.begin(), times.end(), 1), shape.Ranks());
    }
  }
}

TEST(MakeMeshShapeTest, TheDataDimensionIsWhatRemains) {
  const auto shape = MakeMeshShape(2, 3, 24);
  ASSERT_TRUE(shape.ok()) << shape.status();
  EXPECT_EQ(shape->tensor, 2);
  EXPECT_EQ(shape->pipeline, 3);
  EXPECT_EQ(shape->data, 4);
}

TEST(MakeMeshShapeTest, WorkersThatTheMeshDoesNotDivideAreRefusedWithWhatToWrite) {
  const auto between = MakeMeshShape(2, 3, 13);
  EXPECT_EQ(between.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(between.status().message(),
              HasSubstr("resources.workers: seen 13, wanted a multiple of parallel.tensor 2 x "
                        "parallel.pipeline 3 = 6"));
  EXPECT_THAT(between.status().message(), HasSubstr("write 12 or 18 workers"));
  EXPECT_THAT(MakeMeshShape(4, 2, 4).status().message(), HasSubstr("write 8 workers"));
  EXPECT_THAT(MakeMeshShape(0, 1, 4).status().message(), HasSubstr("parallel.tensor: seen 0"));
  EXPECT_THAT(MakeMeshShape(1, 1 << 21, 4).status().message(),
              HasSubstr("parallel.pipeline: seen 2097152"));
  EXPECT_THAT(MakeMeshShape(1, 1, 0).status().message(), HasSubstr("resources.workers: seen 0"));
}

}  // namespace
}  // namespace zeroshard
