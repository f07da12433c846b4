// Communicators for parts of a job: ranks that form a mesh (pipeline x data x tensor) talk along
// its lines, and each line is a communicator of its own, made as the job's is.
//
// Its keys are those of whatever makes it behind "<dimension>/<line>/", in the rendezvous of the
// job's generation ("tensor/1/nccl/0"). So job, generation, dimension and line name them, and none
// is ever used again: a second communicator of a line in one generation is refused.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"

namespace zeroshard {

// The ranks of a job that differ in one coordinate alone.
struct MeshLine {
  std::string dimension;   // "data", "tensor", "pipeline"
  int line = 0;            // which of the lines along it
  std::vector<int> ranks;  // of the job; their places here are their ranks in the communicator
};

// MakeGlooCommunicator, or NCCL's.
using CommunicatorMaker = std::function<absl::StatusOr<std::unique_ptr<Communicator>>(
    const CommunicatorOptions&, Rendezvous*, Device*)>;

// Connects before it returns, with the other ranks of the line alone. `job`: what the communicator
// of the whole job is made with; `rendezvous` is the generation's and needs to live no longer than
// this call. INVALID_ARGUMENT: no name for the dimension, a rank that the job does not have or that
// is there twice, or this rank is not in the list; the maker's errors say which line it was. Ranks
// in the messages of the communicator are those of the line, which they name; the rank that an
// error blames is the job's.
// A rank that is in several lines makes them in the same order as the others.
absl::StatusOr<std::unique_ptr<Communicator>> MakeLineCommunicator(const MeshLine& line,
                                                                   const CommunicatorOptions& job,
                                                                   Rendezvous* rendezvous,
                                                                   Device* device,
                                                                   const CommunicatorMaker& make);

}  // namespace zeroshard
