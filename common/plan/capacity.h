// Which ways to train a model a cluster has room for, what each of them moves, and about how long a
// step would take. Bytes come from the planner of jobs (planner.h) and, of a mesh, from that
// planner over the model's slice (mesh.h). Pure arithmetic; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/plan/planner.h"

namespace zeroshard {

enum class OffloadTo : uint8_t { kNone, kCpu, kNvme };
const char* NameOf(OffloadTo to);

struct Configuration {
  int stage = 0;
  OffloadTo offload = OffloadTo::kNone;  // where the optimizer state is
  bool offload_param = false;            // and the parameters, with it
  bool checkpointing = false;            // of activations
  int tensor = 1, pipeline = 1, data = 1;
  int Devices() const { return tensor * pipeline * data; }
  // What jobs can ask for today.
  bool IsMesh() const { return tensor * pipeline > 1; }
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

// Of the rank that has most: rank 0, whose shards are whole.
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
  double compute = 0;  // seconds
  double hidden = 0;   // of communication that may overlap with it
  double exposed = 0;  // of communication that cannot
  double update = 0;   // of the stores
  double bubble = 0;   // of the pipeline
  double total = 0;    // max(compute, hidden) + exposed + update + bubble
  double tokens = 0;   // of a step, over all ranks
  double TokensPerSecond() const { return total > 0 ? tokens / total : 0; }
};

struct Shortage {
  std::string kind;  // "device memory", "host memory", "NVMe"
  uint64_t wanted = 0, there = 0;
};

struct Evaluation {
  Configuration configuration;
  std::string impossible;  // not empty: why there is no such configuration; the rest is then empty
  int64_t accumulation = 1;  // micro-batches of a rank and step
  Footprint bytes;
  TrafficTable traffic{};  // that the rank sends in a step, by operation and phase
  uint64_t push = 0, pull = 0;
  StepTime time;
  std::vector<Shortage> lacks;
  bool Fits() const { return impossible.empty() && lacks.empty(); }
  uint64_t Moved() const;  // traffic, push and pull
};

Evaluation Evaluate(const Workload& workload, const ClusterSize& cluster,
                    const Configuration& configuration);

// Every configuration of exactly `devices`; of meshes those whose tensor and pipeline are powers of
// two, a tensor group within a host, a pipeline of at most 64 stages.
std::vector<Configuration> Configurations(const ClusterSize& cluster, int devices, bool meshes);

// Whether `a` is to be preferred of two that fit: fewer devices; then what jobs can ask for today;
// then fewer bytes a rank moves in a step for each token; then without checkpointing; then the
// lower stage.
bool Smaller(const Evaluation& a, const Evaluation& b);

// The smallest that fits on at most cluster.devices: 1, 2, 4, ... of them and all; of pipelines
// those whose stages have equally many layers, as others wait for the longest. Nothing: none.
std::optional<Evaluation> SmallestThatFits(const Workload& workload, const ClusterSize& cluster,
                                           bool meshes);

// An upper bound of the transient bytes of a rank: parameters gathered at once, as the schedule
// gathers and prefetches them, and three units' gradients on their way.
uint64_t TransientBytes(const ModelTable& model, const ZeroPolicy& policy);

// Operations of one token's forward pass (two a multiply-add): products with every matrix, the head
// among them, and causal attention over half of the sequence.
double ForwardOperations(const ModelConfig& config);

}  // namespace zeroshard
