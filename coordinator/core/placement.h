// Which worker takes which rank of a mesh: the ranks of a tensor group, which exchange most, on one
// host where there is one that has room for them. Pure; thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "coordinator/core/admission.h"

namespace zeroshard::coordinator {

// By rank, an index into `rooms`. Tensor groups are `tensor` ranks in a row (common/plan/
// rank_mesh.h). Each goes to the first host that has room for all of it, so that neighbours along
// the data dimension are near each other too; what is left over is spread over as few hosts as
// possible. Which groups are whole never decides whether there is a placement: where that way some
// rank finds no room, the largest ranks choose first. Empty: not all ranks find a worker.
std::vector<size_t> PlaceRanks(const std::vector<RankNeed>& needs,
                               const std::vector<WorkerRoom>& rooms, size_t tensor);

// As a job wants them: by PickWorkers, or of a mesh by PlaceRanks.
std::vector<size_t> WorkersFor(const v1::JobSpec& spec, const std::vector<RankNeed>& needs,
                               const std::vector<WorkerRoom>& rooms);

// Of so many ranks of the job, which are a multiple of its replica's.
v1::Mesh MeshMessage(const v1::JobSpec& spec, uint32_t ranks);
// PositionOf.
v1::MeshPosition PositionMessage(const v1::Mesh& mesh, uint32_t rank);

// How tensor groups lie, for an operator: "each of 4 tensor groups is on one host", or which are
// not and where. `hosts` by rank. Empty where `tensor` is 1.
std::string DescribePlacement(const std::vector<std::string>& hosts, size_t tensor);

}  // namespace zeroshard::coordinator
