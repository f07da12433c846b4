#include "worker/agent/mesh_links.h"

#include <utility>

#include "common/status_macros.h"
#include "worker/comm/tensor_group.h"

namespace zeroshard {

std::vector<Communicator*> MeshLinks::All() const {
  std::vector<Communicator*> all;
  for (const auto* link : {&job, &data, &pipeline, &tensor, &copies}) {
    if (*link != nullptr) all.push_back(link->get());
  }
  return all;
}

std::vector<const TrafficCounters*> MeshLinks::Traffic() const {
  std::vector<const TrafficCounters*> traffic;
  for (const Communicator* link : All()) traffic.push_back(&link->traffic());
  return traffic;
}

void MeshLinks::Abort(const std::string& reason) const {
  for (Communicator* link : All()) link->Abort(reason);
}

TrainerMesh MeshLinks::ForTrainer(const MeshShape& shape) const {
  TrainerMesh mesh;
  if (shape.data == shape.Ranks()) return mesh;
  mesh.shape = shape;
  mesh.pipeline = pipeline.get();
  mesh.tensor = tensor.get();
  mesh.copies = copies.get();
  mesh.job = job.get();
  return mesh;
}

absl::StatusOr<MeshLinks> MakeMeshLinks(const MeshShape& shape, int copies,
                                        const CommunicatorOptions& options, Rendezvous* rendezvous,
                                        Device* device, const CommunicatorMaker& make) {
  MeshLinks links;
  ZS_ASSIGN_OR_RETURN(links.job, make(options, rendezvous, device));
  if (shape.data == shape.Ranks()) return links;
  const MeshPosition at = PositionOf(shape, options.rank);
  const auto line = [&](const char* name, MeshDimension dimension, int number) {
    return MeshLine{name, number, LineOf(shape, dimension, options.rank)};
  };
  ZS_ASSIGN_OR_RETURN(links.data, MakeLineCommunicator(line("data", MeshDimension::kData,
                                                            at.pipeline * shape.tensor + at.tensor),
                                                       options, rendezvous, device, make));
  if (shape.tensor > 1) {
    ZS_ASSIGN_OR_RETURN(
        TensorLines lines,
        MakeTensorLines(line("tensor", MeshDimension::kTensor, at.pipeline * shape.data + at.data),
                        copies, options, rendezvous, device, make));
    links.tensor = std::move(lines.line);
    links.copies = std::move(lines.copies);
  }
  if (shape.pipeline > 1) {
    ZS_ASSIGN_OR_RETURN(links.pipeline,
                        MakeLineCommunicator(line("pipeline", MeshDimension::kPipeline,
                                                  at.data * shape.tensor + at.tensor),
                                             options, rendezvous, device, make));
  }
  return links;
}

}  // namespace zeroshard
