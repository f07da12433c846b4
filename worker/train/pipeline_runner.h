// Runs a step's micro-batches through this rank's stages of a pipeline, in the order of its
// schedule: computes on the device's compute stream, transfers on the pipeline line's communicator,
// and each waits for the other by events alone. Not thread-safe.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/plan/pipeline_schedule.h"
#include "common/plan/stage_model.h"
#include "worker/comm/communicator.h"
#include "worker/comm/tensor_group.h"
#include "worker/comm/waiting.h"
#include "worker/device/device.h"
#include "worker/model/unit.h"
#include "worker/ops/ops.h"
#include "worker/train/loss_runner.h"
#include "worker/train/stage_memory.h"
#include "worker/zero/engine.h"

namespace zeroshard {

// What a runner works with; all outlive it.
struct PipelineParts {
  const StageModel* stage = nullptr;
  const RankSchedule* schedule = nullptr;
  const ZeroPolicy* policy = nullptr;  // MakeStagePolicy's
  const Model* units = nullptr;        // MakeStageUnits's
  ZeroEngine* engine = nullptr;        // of `policy`
  Device* device = nullptr;
  Ops* ops = nullptr;
  Communicator* line = nullptr;  // the pipeline's; may be null where it has one rank
  TensorGroup* group = nullptr;  // the units'; null where they have none
};

class PipelineRunner : public LossRunner {
 public:
  // RESOURCE_EXHAUSTED from the device.
  static absl::StatusOr<std::unique_ptr<PipelineRunner>> Create(const PipelineParts& parts);
  // Waits for what is on its way between ranks; whoever ends a step early aborts the lines first.
  ~PipelineRunner() override;

  // After ZeroEngine::BeginStep: every round, forward and backward; at most OpenMicroBatches are
  // asked for before the oldest of them is done with. Gradients are the engine's to
  // finish then; nothing is on its way between stages. CANCELLED where `stop` is seen between two
  // computes; else the collectives', the device's or the engine's errors.
  absl::Status Step(uint64_t step, const Load& load, const Progress& progress,
                    const std::atomic<bool>& stop);
  // By round, of the latest step: the loss where the head is, `inputs` where the embedding is.
  // Waits for the device, whose error it has. Valid until the next call.
  absl::StatusOr<absl::Span<const MicroBatchSums>> Sums() {
    return ReadSums(parts_.policy->rounds);
  }

  int64_t MostLosses() const override { return slots_; }
  int64_t OpenLosses() const override { return open_losses_; }
  absl::StatusOr<absl::Span<const MicroBatchSums>> Losses(uint64_t step, int64_t n,
                                                          const Load& load,
                                                          const Progress& progress,
                                                          const std::atomic<bool>& stop) override;

  // Told of waits for other stages from now on; null: nobody.
  void SetWaitObserver(WaitObserver* observer) { waits_ = observer; }

 private:
  PipelineRunner(const PipelineParts& parts, StageMemory memory);
  // Of an evaluation of some number of micro-batches.
  struct ForwardPass {
    RankSchedule schedule;
    std::vector<UnitUse> uses;
  };
  absl::StatusOr<const ForwardPass*> PassOf(int64_t micro_batches);
  absl::Status Drain();
  absl::Status RunAll(const RankSchedule& schedule, const Load& load, const Progress& progress,
                      const std::atomic<bool>& stop);
  absl::StatusOr<absl::Span<const MicroBatchSums>> ReadSums(int64_t n);
  absl::Status Run(const Action& action, const Load& load, const Progress& progress);
  void Transfers(const std::vector<StageTransfer>& transfers);
  absl::Status Forward(const Action& action, const Progress& progress);
  absl::Status Backward(const Action& action, const Progress& progress);
  absl::Status Loss(int unit, int64_t micro_batch, const Progress& progress);
  absl::Status Head(int unit, int64_t micro_batch, void* dx, const Progress& progress);
  absl::Status Embedding(int64_t micro_batch, const void* dy, const Progress& progress);
  // What was sent here, once it is there.
  absl::StatusOr<BoundarySlot*> Input(int virtual_stage, int64_t micro_batch, bool gradient);
  // Where an output goes: a buffer that leaves, once what it had has left, or where this rank
  // itself uses it next.
  absl::StatusOr<BoundarySlot*> Output(int virtual_stage, int64_t micro_batch, bool gradient);
  UnitContext Context(int unit, int64_t micro_batch) const;
  const std::string& UnitName(int unit) const {
    return parts_.stage->model.units[static_cast<size_t>(unit)].name;
  }
  const MicroBatch& Batch(int64_t i) const {
    return batches_[static_cast<size_t>(i) % batches_.size()];
  }

  const PipelineParts parts_;
  Stream* const compute_;
  StageMemory memory_;
  std::vector<MicroBatch> batches_;  // those open
  int64_t loaded_ = 0;               // of the step or evaluation
  const int64_t slots_;              // whose sums are kept: at least a step's rounds
  int64_t open_losses_ = 1;
  bool evaluating_ = false;
  std::map<int64_t, ForwardPass> passes_;  // by micro-batches: full calls, and the last one
  uint64_t step_ = 0;
  WaitObserver* waits_ = nullptr;
  Buffer sums_, read_sums_;  // by micro-batch: the device's, the host's
};

}  // namespace zeroshard
