// The training loop of one rank: data, micro-batches, the engine's hooks, the optimizer step.
// Knows nothing of gRPC: whoever owns it passes the collectives in and observes.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/file_system.h"
#include "common/plan/rank_mesh.h"
#include "common/tokenizer/tokenizer.h"
#include "worker/comm/communicator.h"
#include "worker/data/dataset.h"
#include "worker/device/device.h"
#include "worker/ops/ops.h"
#include "worker/train/step_meter.h"
#include "worker/zero/state_store.h"
#include "zeroshard/v1/cluster.pb.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// The phases of zeroshard_worker_phase_seconds_total.
enum class StepPhase : uint8_t {
  kData,
  kForward,
  kBackward,
  kCommunication,
  kOffload,
  kOptimizer,
  kBarrier
};
constexpr int kStepPhases = 7;
const char* NameOf(StepPhase phase);

// What a rank asks the others for at the end of a step.
enum class SaveRequest : uint8_t { kNone, kSave, kSaveAndStop };

// Called on the training thread.
class TrainObserver {
 public:
  virtual ~TrainObserver() = default;
  // Before each part of a step: "step 12 backward blocks.3".
  virtual void OnProgress(uint64_t step, StepPhase phase, const std::string& unit) = 0;
  // A rank of a mesh waits for other ranks, or goes on: between two of the above.
  virtual void OnWait(bool waits) {}
  // On every rank, the same record, after the optimizer step. Where TrainerOptions::evaluate asks
  // for it, before the first one a record of which only step and eval_loss count.
  virtual void OnStep(const v1::StepRecord& record) = 0;
  // Rank 0 only: true while the report queue is full, because the coordinator is away. All ranks
  // then wait together, in collectives far shorter than the deadline, until it is false.
  virtual bool ShouldHold() { return false; }
  // Rank 0 of an offloaded job, before it commits a step: returns when the coordinator has every
  // loss on the validation set that OnStep said. With the commit it takes the record before as
  // whole.
  virtual absl::Status BeforeCommit() { return absl::OkStatus(); }
  // Asked on every rank once a step; the strongest answer counts on all. Every rank then writes its
  // part of a checkpoint, and with kSaveAndStop Run ends once it is complete. Not asked of an
  // offloaded job, whose ranks have nothing to save.
  virtual SaveRequest WantsSave() { return SaveRequest::kNone; }
  // Rank 0 only: a checkpoint is complete, or was abandoned.
  virtual void OnCheckpoint(const v1::CheckpointRecord& record) {}
  // Rank 0 only.
  virtual void OnSample(const v1::SampleRecord& record) {}
};

// Live counters for the metrics; any thread may read.
struct TrainCounters {
  std::atomic<uint64_t> tokens{0};  // this rank's
  std::array<std::atomic<uint64_t>, kStepPhases> phase_nanoseconds{};
  // Of kCommunication: waiting for other stages of a pipeline, also at a step's end. Its share of
  // all phases' time is the idle share that was measured.
  std::atomic<uint64_t> pipeline_wait_nanoseconds{0};
};

// The share of a step in which a pipeline's ranks stand idle, 0 to 1; 0 where it has one.
struct BubbleShares {
  // (p - 1) / (v m + p - 1): stages that take equally long (common/plan/pipeline_time.h).
  double predicted = 0;
  // Of the schedule, with stages that take as long as their units' declared costs say.
  double counted = 0;
};

// A job's ranks as a mesh (common/plan/rank_mesh.h). Ranks that differ in their data index
// alone are the data line, which TrainerOptions::comm connects; where that is all ranks, nothing
// here is set.
struct TrainerMesh {
  MeshShape shape;
  int virtual_stages = 1;            // of each rank
  Communicator* pipeline = nullptr;  // this rank's line; null where it has one rank
  Communicator* tensor = nullptr;    // this rank's line; null where it has one rank
  // Of the tensor ranks with the same key and value heads (worker/comm/tensor_group.h); null where
  // each has its own.
  Communicator* copies = nullptr;
  Communicator* job = nullptr;  // of all ranks, by RankAt; null where the data line is all
};

struct TrainerOptions {
  v1::JobSpec spec;  // validated and normalised (common/spec)
  uint64_t first_step = 1;
  // The checkpoint to go on from, one more than whose step is first_step; or with weights_only its
  // weights alone, at first_step 1. Else the weights are model.init_from's, else fresh ones.
  std::string resume_from;
  bool weights_only = false;
  // Of an offloaded job, where the state is (it outlives the trainer); else null. The weights come
  // from there, and not from the two above; first_step is the one after the version it begins with,
  // and next_sample the position of that step's first sample in the run's order, loss_scale (of an
  // fp16 job) what that step is scaled by.
  StateStore* store = nullptr;
  uint64_t next_sample = 0;
  v1::LossScale loss_scale;
  // Of an offloaded job that evaluates: the loss after first_step - 1 is measured and reported
  // before anything else, also where no step is left.
  bool evaluate = false;
  std::string job, run_id;   // written into checkpoints
  Device* device = nullptr;  // these three outlive the trainer
  Ops* ops = nullptr;
  Communicator* comm = nullptr;  // rank and world size come from here: the data line's
  TrainerMesh mesh;              // its communicators outlive the trainer too
  const TokenDataset* data = nullptr;
  const TokenDataset* eval_data = nullptr;  // where spec.eval names any
  const Tokenizer* tokenizer = nullptr;     // where spec.sample has prompts
  FileSystem* files = nullptr;              // null: the real one
  const std::atomic<bool>* stop = nullptr;  // optional: true ends Create with CANCELLED
};

class Trainer {
 public:
  // Builds the model, allocates everything, fills parameters and state. Collective where they come
  // from files. INVALID_ARGUMENT / RESOURCE_EXHAUSTED / NOT_FOUND / DATA_LOSS say which field, file
  // or how many bytes; FAILED_PRECONDITION: who holds the checkpoint folder.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(const TrainerOptions& options);
  virtual ~Trainer() = default;

  // Trains from first_step to spec.steps. Returns when done, when `stop` became true (CANCELLED,
  // seen between micro-batches; nothing is saved), when a save and stop was asked for and the
  // checkpoint is complete (CANCELLED, "saved step 57"; the save's error otherwise), or at the
  // first error: a collective's, or INTERNAL naming step, rank and sample for a non-finite loss or
  // gradient (IsNonFinite) that the loss scale of an fp16 job does not answer for. After the last
  // step a checkpoint is written where the specification has a checkpoint section. Offloaded jobs
  // commit each step through the store before anything uses it, and write no checkpoints here:
  // coordinator and stores do. After an error whoever owns communicators and store aborts all
  // before the trainer goes. That the last step is committed is what rank 0's OK says.
  virtual absl::Status Run(TrainObserver* observer, const std::atomic<bool>& stop) = 0;

  // After Run was OK, on every rank together: the digest of the final fp32 parameters. Empty for an
  // offloaded job, whose stores have them.
  virtual absl::StatusOr<std::string> WeightsDigest() = 0;
  // Replaces one tensor's values before Run; each rank keeps what it holds of it. NOT_FOUND names
  // the nearest tensors, INVALID_ARGUMENT the sizes.
  virtual absl::Status SetTensor(const std::string& name, absl::Span<const float> values) = 0;
  // One tensor's fp32 values, on every rank together (tests, later export). NOT_FOUND lists names.
  virtual absl::StatusOr<std::vector<float>> GatherTensor(const std::string& name) = 0;
  // The same as the ranks of this pipeline position hold it, on all of these together. NOT_FOUND
  // where they do not.
  virtual absl::StatusOr<std::vector<float>> StageTensor(const std::string& name) {
    return GatherTensor(name);
  }

  virtual const TrainCounters& counters() const = 0;
  // Of a trainer that counts it; thread-safe.
  virtual StepTraffic last_step() const { return {}; }
  // Of its pipeline, the same for every step; thread-safe.
  virtual BubbleShares bubble() const { return {}; }
};

}  // namespace zeroshard
