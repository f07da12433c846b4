// Ranks as a mesh pipeline x data x tensor (architecture, section 12): who is whose neighbour and
// who holds the same values. Pure arithmetic; thread-safe. Ranks and indices must be in range.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace zeroshard {

struct MeshShape {
  int pipeline = 1, data = 1, tensor = 1;
  int Ranks() const { return pipeline * data * tensor; }
};

struct MeshPosition {
  int pipeline = 0, data = 0, tensor = 0;
  friend bool operator==(const MeshPosition&, const MeshPosition&) = default;
};

enum class MeshDimension : uint8_t { kPipeline, kData, kTensor };

// Of a job's parallel.tensor, parallel.pipeline and resources.workers, each at least 1; the data
// dimension is what remains. INVALID_ARGUMENT names the key, the values and what to write: where
// tensor x pipeline does not divide the workers, or a value is 0 or past 2^20.
absl::StatusOr<MeshShape> MakeMeshShape(int64_t tensor, int64_t pipeline, int64_t workers);

// rank = (pipeline * D + data) * T + tensor. Tensor ranks, which exchange most, are neighbours;
// then data; a pipeline's stages, which exchange least, are farthest apart.
int RankAt(const MeshShape& shape, const MeshPosition& position);
MeshPosition PositionOf(const MeshShape& shape, int rank);

// A line: the ranks that differ in one index alone, by that index. A rank's place in its own line
// is therefore its index. Every collective runs over one line of its dimension.
std::vector<int> LineOf(const MeshShape& shape, MeshDimension dimension, int rank);
// All lines of a dimension, by their first rank: each rank is in exactly one.
std::vector<std::vector<int>> LinesOf(const MeshShape& shape, MeshDimension dimension);

}  // namespace zeroshard
