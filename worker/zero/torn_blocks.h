// Digests of slices: blocks of 64 elements that several tensor ranks have parts of.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/state_digest.h"
#include "worker/comm/communicator.h"

namespace zeroshard {

// Collective over `job`, of all ranks that have parts: everyone's, on every rank. A few hundred
// bytes for each end of a run that is not at a multiple of 64, which are few in real models: biases
// by heads. Two exchanges, or one where nobody has any. The collective's errors; INTERNAL: a number
// of parts that cannot be.
absl::StatusOr<std::vector<BlockPart>> GatherParts(Communicator* job,
                                                   const std::vector<BlockPart>& own,
                                                   const CollectiveInfo& info);

// Those of one kind of state.
std::vector<BlockPart> OfKind(const std::vector<BlockPart>& parts, size_t kind);

// The parts of several digests, marked with their places in the list as kinds.
std::vector<BlockPart> PartsOf(const PartedDigest* digests, size_t kinds);

}  // namespace zeroshard
