// Which ways to train a model a cluster has room for, what each of them moves, and about how long a
// step would take. Bytes come from the planner of jobs (planner.h), of a mesh for each rank that
// may hold most (mesh.h). Pure arithmetic; thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/plan/mesh.h"
#include "common/plan/planner.h"
#include "common/plan/transient_bytes.h"

namespace zeroshard {

enum class OffloadTo : uint8_t { kNone, kCpu, kNvme };
const char* NameOf(OffloadTo to);

struct Configuration {
  int stage = 0;
  OffloadTo offload = OffloadTo::kNone;  // where the optimizer state is
  bool offload_param = false;            // and the parameters, with it
  bool checkpointing = false;            // of activations
  int tensor = 1, pipeline = 1, data = 1;
  int virtual_stages = 1;
  bool sequence_parallel = false;
  bool full_gradients = false;  // ZeroOptions::full_gradients
  int Devices() const { return tensor * pipeline * data; }
  bool IsMesh() const { return tensor * pipeline > 1; }
  MeshCut Cut() const { return {tensor, pipeline, virtual_stages, sequence_parallel}; }
};
// "stage 3, optimizer and parameters on nvme, activation checkpointing, tensor 8 x data 64".
std::string Describe(const Configuration& configuration);

// What there is. Bytes; bytes a second and direction; 0: none of it.
struct ClusterSize {
  int devices = 1;
  int devices_per_host = 8;
  uint64_t device_memory = 0;
  uint64_t host_memory = 0;  // of each host, for the shard stores
  uint64_t nvme = 0;         // of each host, likewise
  double network = 0;        // of a host, all its devices together
  double device_link = 0;    // of a device to the others of its host
  double host_link = 0;      // of a device to its host's memory
  double memory_speed = 0;   // of a host's memory, read and written together
  double nvme_speed = 0;     // of a host's disks, likewise
  double peak = 0;           // operations a second of a device, in the job's type
  double peak_share = 0;     // of it that products reach
  double link_share = 0;     // of every link's speed that is reached
  int Hosts(int of_devices) const { return (of_devices + devices_per_host - 1) / devices_per_host; }
};

// What is to be trained. Of `options` everything holds but what a Configuration says.
struct Workload {
  ModelTable model;
  ZeroOptions options;
  // Micro-batches of a step over all data-parallel ranks; 0: `accumulation` for each rank.
  int64_t micro_batches = 0;
  int64_t accumulation = 1;
  bool momentum_only = false;  // SGD
  bool saves = false;          // it has a checkpoint section
  // stage3_prefetch_bucket_size is one block, whatever its size, and nothing is kept for later:
  // what stage 3 needs at the least to overlap.
  bool fetch_one_ahead = false;
};

// Of a data line's first rank, whose shards are whole.
struct Footprint {
  uint64_t parameters = 0, gradients = 0, optimizer = 0, activations = 0;
  // An upper bound of what is gathered at once and of gradients on their way, which is all there is
  // of those that the policy does not keep; not counted where a job is admitted.
  uint64_t buffers = 0;
  uint64_t Device() const;
  // Of each host: what the stores keep there, and copies that checkpoints are written from.
  uint64_t host = 0, nvme = 0;
};

struct StepTime {
  double compute = 0;  // seconds; of the busiest stage
  double hidden = 0;   // of communication that may overlap with it
  double exposed = 0;  // of communication that cannot, tensor parallelism's apart
  double tensor = 0;   // of tensor parallelism's communication
  double update = 0;   // of the stores
  double bubble = 0;   // in which the busiest stage waits for the others of its pipeline
  double total = 0;    // max(compute, hidden) + exposed + tensor + update + bubble
  double tokens = 0;   // of a step, over all ranks
  double TokensPerSecond() const { return total > 0 ? tokens / total : 0; }
};

struct Shortage {
  std::string kind;  // "device memory", "host memory", "NVMe"
  uint64_t wanted = 0, there = 0;
};

// Of the ranks at one place in their pipelines: what one of them holds, and sends in a step.
struct PositionPlan {
  int pipeline = 0;
  Footprint bytes;  // host and nvme are the configuration's
  TrafficTable traffic{};
  TrafficTable tensor{};  // those of `traffic` that go to its tensor group
  uint64_t push = 0, pull = 0;
  uint64_t Moved() const;  // traffic, push and pull
};

struct Evaluation {
  Configuration configuration;
  std::string impossible;  // not empty: why there is no such configuration; the rest is then empty
  int64_t accumulation = 1;             // micro-batches of a rank and step
  std::vector<PositionPlan> positions;  // CutModel::Positions
  int fullest = 0;                      // of them, the one whose rank holds most on its device
  Footprint bytes;                      // of that rank
  // Of the position that moves most: what one rank sends in a step, by operation and phase.
  TrafficTable traffic{}, tensor{};
  uint64_t push = 0, pull = 0;
  // Idle shares of all ranks' time: by PredictedBubble, and of the schedule with stages that take
  // as long as their units cost.
  double predicted_bubble = 0, counted_bubble = 0;
  StepTime time;
  std::vector<Shortage> lacks;
  bool Fits() const { return impossible.empty() && lacks.empty(); }
  uint64_t Moved() const;  // traffic, push and pull
};

Evaluation Evaluate(const Workload& workload, const ClusterSize& cluster,
                    const Configuration& configuration);

// The same for many configurations of one model, whose cuts and schedules it keeps. Both outlive
// it. Not thread-safe.
class PlanEvaluator {
 public:
  PlanEvaluator(const Workload* workload, const ClusterSize* cluster)
      : workload_(*workload), cluster_(*cluster) {}
  Evaluation Evaluate(const Configuration& configuration);

 private:
  struct Cut {
    CutModel model;
    std::vector<StageModel> parts;   // at Positions
    std::vector<TensorRank> slices;  // of each the first tensor rank's
  };
  const Cut& CutOf(const MeshCut& cut, bool checkpointing);
  const std::vector<RankSchedule>& Schedules(const PipelineShape& shape);
  void PlanPositions(const Configuration& configuration, const Cut& cut, const ZeroOptions& options,
                     Evaluation* e);
  RankPlan PlanStage(const Configuration& configuration, const Cut& cut, size_t position,
                     const ZeroOptions& options, ZeroPolicy* policy);

  const Workload& workload_;
  const ClusterSize& cluster_;
  std::map<std::tuple<int, int, int, bool, bool>, Cut> cuts_;
  std::map<std::tuple<int, int, int64_t>, std::vector<RankSchedule>> schedules_;
};

// Every configuration of exactly `devices`; of meshes those whose tensor and pipeline are powers of
// two, a tensor group within a host, a pipeline of at most 64 stages.
std::vector<Configuration> Configurations(const ClusterSize& cluster, int devices, bool meshes);

// Whether `a` is to be preferred of two that fit: fewer devices; then data parallelism alone; then
// fewer bytes a rank moves in a step for each token; then without checkpointing; then the lower
// stage.
bool Smaller(const Evaluation& a, const Evaluation& b);

// The smallest that fits on at most cluster.devices: 1, 2, 4, ... of them and all; of pipelines
// those whose stages have equally many layers, as others wait for the longest, and whose ranks have
// a micro-batch for each stage. Nothing: none.
std::optional<Evaluation> SmallestThatFits(const Workload& workload, const ClusterSize& cluster,
                                           bool meshes);

// Operations of one token's forward pass (two a multiply-add): products with every matrix, the head
// among them, and causal attention over half of the sequence.
double ForwardOperations(const ModelConfig& config);

}  // namespace zeroshard
