// Two ranks as threads of this process, each with a core of its own and a communicator for every
// line of a mesh, as jobs have them.
#pragma once

#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "common/plan/rank_mesh.h"
#include "worker/comm/gloo_communicator.h"
#include "worker/comm/line_communicator.h"
#include "worker/comm/memory_rendezvous.h"
#include "worker/device/device.h"

namespace zeroshard::bench {

inline void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "mesh_bench: %s\n", status.ToString().c_str());
  std::_Exit(1);
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

struct RankLines {
  std::unique_ptr<Device> device;
  std::unique_ptr<Communicator> data, pipeline, tensor, job;  // of one rank, too
};

// Every rank calls it.
inline RankLines Connect(const MeshShape& shape, int rank, Rendezvous* rendezvous) {
  RankLines lines;
  lines.device = MakeCpuDevice();
  CommunicatorOptions options;
  options.rank = rank;
  options.size = shape.Ranks();
  options.host = "127.0.0.1";
  const CommunicatorMaker make = [](const CommunicatorOptions& of, Rendezvous* at, Device* device) {
    return MakeGlooCommunicator(of, at, device);
  };
  const MeshPosition at = PositionOf(shape, rank);
  const auto line = [&](const char* name, MeshDimension dimension, int number) {
    return Must(MakeLineCommunicator({name, number, LineOf(shape, dimension, rank)}, options,
                                     rendezvous, lines.device.get(), make));
  };
  lines.data = line("data", MeshDimension::kData, at.pipeline * shape.tensor + at.tensor);
  lines.pipeline = line("pipeline", MeshDimension::kPipeline, at.data * shape.tensor + at.tensor);
  lines.tensor = line("tensor", MeshDimension::kTensor, at.pipeline * shape.data + at.data);
  lines.job = Must(MakeGlooCommunicator(options, rendezvous, lines.device.get()));
  return lines;
}

inline void OnTwoRanks(const std::function<void(int rank)>& body) {
  const auto pinned = [&body](int rank) {
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(rank, &core);
    if (sched_setaffinity(0, sizeof(core), &core) != 0)
      std::fprintf(stderr, "mesh_bench: rank %d is not pinned: core %d is not ours\n", rank, rank);
    body(rank);
  };
  std::thread first(pinned, 0), second(pinned, 1);
  first.join();
  second.join();
}

}  // namespace zeroshard::bench
