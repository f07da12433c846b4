#include "common/plan/rank_mesh.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr int64_t kMostRanks = int64_t{1} << 20;

int SizeOf(const MeshShape& shape, MeshDimension dimension) {
  switch (dimension) {
    case MeshDimension::kPipeline:
      return shape.pipeline;
    case MeshDimension::kData:
      return shape.data;
    case MeshDimension::kTensor:
      return shape.tensor;
  }
  return 1;
}

int& IndexOf(MeshPosition* position, MeshDimension dimension) {
  if (dimension == MeshDimension::kPipeline) return position->pipeline;
  return dimension == MeshDimension::kData ? position->data : position->tensor;
}

}  // namespace

absl::StatusOr<MeshShape> MakeMeshShape(int64_t tensor, int64_t pipeline, int64_t workers) {
  for (const auto& [key, seen] : {std::pair<const char*, int64_t>{"parallel.tensor", tensor},
                                  {"parallel.pipeline", pipeline},
                                  {"resources.workers", workers}}) {
    if (seen < 1 || seen > kMostRanks)
      return absl::InvalidArgumentError(
          absl::StrCat(key, ": seen ", seen, ", wanted 1 to ", kMostRanks));
  }
  const int64_t cell = tensor * pipeline;
  if (workers % cell != 0) {
    const int64_t below = workers / cell * cell;
    return absl::InvalidArgumentError(
        absl::StrCat("resources.workers: seen ", workers, ", wanted a multiple of parallel.tensor ",
                     tensor, " x parallel.pipeline ", pipeline, " = ", cell,
                     ", as each data-parallel replica of the model takes so many; write ",
                     below > 0 ? absl::StrCat(below, " or ") : "", below + cell,
                     " workers, or another tensor and pipeline"));
  }
  return MeshShape{.pipeline = static_cast<int>(pipeline),
                   .data = static_cast<int>(workers / cell),
                   .tensor = static_cast<int>(tensor)};
}

int RankAt(const MeshShape& shape, const MeshPosition& position) {
  return (position.pipeline * shape.data + position.data) * shape.tensor + position.tensor;
}

MeshPosition PositionOf(const MeshShape& shape, int rank) {
  return {.pipeline = rank / (shape.data * shape.tensor),
          .data = rank / shape.tensor % shape.data,
          .tensor = rank % shape.tensor};
}

std::vector<int> LineOf(const MeshShape& shape, MeshDimension dimension, int rank) {
  MeshPosition position = PositionOf(shape, rank);
  std::vector<int> line;
  for (int i = 0; i < SizeOf(shape, dimension); ++i) {
    IndexOf(&position, dimension) = i;
    line.push_back(RankAt(shape, position));
  }
  return line;
}

std::vector<std::vector<int>> LinesOf(const MeshShape& shape, MeshDimension dimension) {
  std::vector<std::vector<int>> lines;
  for (int rank = 0; rank < shape.Ranks(); ++rank) {
    MeshPosition position = PositionOf(shape, rank);
    if (IndexOf(&position, dimension) == 0) lines.push_back(LineOf(shape, dimension, rank));
  }
  return lines;
}

}  // namespace zeroshard
