// The communicators of one rank of a mesh (common/plan/rank_mesh.h), made under one generation.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/rank_mesh.h"
#include "worker/comm/line_communicator.h"
#include "worker/train/trainer.h"

namespace zeroshard {

struct MeshLinks {
  std::unique_ptr<Communicator> job;   // of all ranks
  std::unique_ptr<Communicator> data;  // null: that line is all ranks
  // Null where such a line has one rank.
  std::unique_ptr<Communicator> pipeline, tensor, copies;

  Communicator* DataLine() const { return data != nullptr ? data.get() : job.get(); }
  // All that there are.
  std::vector<Communicator*> All() const;
  std::vector<const TrafficCounters*> Traffic() const;
  void Abort(const std::string& reason) const;
  // What a trainer of `shape` needs of them; of a job without a mesh nothing.
  TrainerMesh ForTrainer(const MeshShape& shape) const;
};

// `options`: of the job; options.rank is one of the shape's. `copies`: tensor ranks side by side
// with the same key and value heads. Where the job has more than a data line, the lines are made
// one after the other, in the same order on all ranks. Errors as MakeLineCommunicator.
absl::StatusOr<MeshLinks> MakeMeshLinks(const MeshShape& shape, int copies,
                                        const CommunicatorOptions& options, Rendezvous* rendezvous,
                                        Device* device, const CommunicatorMaker& make);

}  // namespace zeroshard
