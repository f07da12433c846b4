// What measures the loss of text that is not trained on: a rank's part of the model.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/model/unit.h"
#include "worker/ops/ops.h"
#include "worker/train/trainer.h"

namespace zeroshard {

// Micro-batches whose sums are kept at least: an evaluation asks the device for its losses once in
// so many.
constexpr int64_t kLeastSums = 64;

// Not thread-safe.
class LossRunner {
 public:
  // Called before each unit's forward and backward.
  using Progress = std::function<void(StepPhase phase, const std::string& unit)>;
  // Micro-batch i of a call, which stays as it is until its last compute.
  using Load = std::function<absl::StatusOr<MicroBatch>(int64_t i)>;

  virtual ~LossRunner() = default;

  // Micro-batches of one call at most.
  virtual int64_t MostLosses() const = 0;
  // How many of a call are asked for before the first of them is done with, at most.
  virtual int64_t OpenLosses() const = 0;
  // Between steps, all ranks of a mesh the same `n`: the summed loss of each micro-batch where the
  // head is, else 0. Waits for the device, whose error it has; CANCELLED where `stop` is seen; else
  // the collectives' errors. Valid until the next call of either kind.
  virtual absl::StatusOr<absl::Span<const MicroBatchSums>> Losses(
      uint64_t step, int64_t n, const Load& load, const Progress& progress,
      const std::atomic<bool>& stop) = 0;
};

}  // namespace zeroshard
