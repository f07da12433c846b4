// Runs one micro-batch through the model: the engine lends parameters, the units compute. Owns the
// activation memory. Not thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/plan/zero_policy.h"
#include "worker/device/device.h"
#include "worker/model/unit.h"
#include "worker/ops/ops.h"
#include "worker/train/loss_runner.h"
#include "worker/zero/engine.h"

namespace zeroshard {

class ModelRunner : public LossRunner {
 public:
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(const Model* model,
                                                             const ZeroPolicy* policy,
                                                             ZeroEngine* engine, Device* device,
                                                             Ops* ops);

  // tokens and targets [mb, T]; gradients go to the engine, what the host is to know into `slot`.
  absl::Status ForwardBackward(const MicroBatch& micro_batch, int64_t slot,
                               const Progress& progress);
  // Of slots 0 to n - 1, each of what it was used for last; waits for the device, whose error
  // it has. Valid until the next call.
  absl::StatusOr<absl::Span<const MicroBatchSums>> Sums(int64_t n);

  int64_t MostLosses() const override { return slots_; }
  int64_t OpenLosses() const override { return 1; }
  absl::StatusOr<absl::Span<const MicroBatchSums>> Losses(uint64_t step, int64_t n,
                                                          const Load& load,
                                                          const Progress& progress,
                                                          const std::atomic<bool>& stop) override;

 private:
  ModelRunner(const Model* model, const ZeroPolicy* policy, ZeroEngine* engine, Device* device,
              Ops* ops);
  UnitContext Context(int unit) const;
  absl::Status Forward(const MicroBatch& mb, const Progress& progress);
  // The loss alone, after ZeroEngine::BeginEvaluation.
  absl::Status Loss(const MicroBatch& micro_batch, int64_t slot, const Progress& progress);
  absl::Status Head(const MicroBatch& mb, double* loss, const Progress& progress);
  absl::Status Backward(const MicroBatch& mb, const Progress& progress);
  const std::string& UnitName(int unit) const {
    return model_.table.units[static_cast<size_t>(unit)].name;
  }
  // Of a slot, zero again.
  MicroBatchSums* ClearSums(int64_t slot);
  // The input of a unit, where the unit before writes its output.
  void* Input(int unit) const { return kept_[static_cast<size_t>(unit)]; }

  const Model& model_;
  const ZeroPolicy& policy_;
  ZeroEngine& engine_;
  Device* const device_;
  Ops* ops_;
  const int64_t slots_;  // whose sums are kept: at least a step's rounds
  int head_ = 0;
  Buffer memory_;
  std::vector<char*> kept_;  // by unit
  char* scratch_ = nullptr;
  char* gradient_ = nullptr;       // of the boundary above
  char* next_gradient_ = nullptr;  // of the boundary below
  Buffer sums_, read_sums_;        // by slot: the device's, the host's
};

}  // namespace zeroshard
