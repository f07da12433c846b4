// Runs one micro-batch through the model: the engine lends parameters, the units compute. Owns the
// activation memory. Not thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/zero_policy.h"
#include "worker/device/device.h"
#include "worker/model/unit.h"
#include "worker/ops/ops.h"
#include "worker/train/trainer.h"
#include "worker/zero/engine.h"

namespace zeroshard {

struct MicroBatchResult {
  LossResult loss;
  bool input_gradient_finite = true;  // of the embedding's output
};

class ModelRunner {
 public:
  // Called before each unit's forward and backward.
  using Progress = std::function<void(StepPhase phase, const std::string& unit)>;

  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(const Model* model,
                                                             const ZeroPolicy* policy,
                                                             ZeroEngine* engine, Device* device,
                                                             Ops* ops);

  // tokens and targets [mb, T]; gradients go to the engine.
  absl::StatusOr<MicroBatchResult> ForwardBackward(const MicroBatch& micro_batch,
                                                   const Progress& progress);
  // The loss alone, after ZeroEngine::BeginEvaluation.
  absl::StatusOr<LossResult> Loss(const MicroBatch& micro_batch, const Progress& progress);

 private:
  ModelRunner(const Model* model, const ZeroPolicy* policy, ZeroEngine* engine, Ops* ops)
      : model_(*model), policy_(*policy), engine_(*engine), ops_(ops) {}
  UnitContext Context(int unit) const;
  absl::Status Forward(const MicroBatch& mb, const Progress& progress);
  absl::Status Head(const MicroBatch& mb, const Progress& progress, LossResult* loss);
  absl::Status Backward(const MicroBatch& mb, const Progress& progress);
  const std::string& UnitName(int unit) const {
    return model_.table.units[static_cast<size_t>(unit)].name;
  }
  // The input of a unit, where the unit before writes its output.
  void* Input(int unit) const { return kept_[static_cast<size_t>(unit)]; }

  const Model& model_;
  const ZeroPolicy& policy_;
  ZeroEngine& engine_;
  Ops* ops_;
  int head_ = 0;
  Buffer memory_;
  std::vector<char*> kept_;  // by unit
  char* scratch_ = nullptr;
  char* gradient_ = nullptr;       // of the boundary above
  char* next_gradient_ = nullptr;  // of the boundary below
};

}  // namespace zeroshard
