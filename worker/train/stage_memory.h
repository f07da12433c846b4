// Where a rank of a pipeline keeps what its units keep from forward to backward, and what comes and
// goes between stages: one allocation, carved as common/plan/stage_model.h counts it. Knows when
// each place is free again. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/stage_model.h"
#include "worker/device/device.h"

namespace zeroshard {

// One [mb*T, C] between two units.
struct BoundarySlot {
  void* data = nullptr;
  Event filled = {};  // what is read here is there once it is done
  Event read = {};    // what comes next may be written here once it is done
};

class StageMemory {
 public:
  // RESOURCE_EXHAUSTED from the device. All outlive it.
  static absl::StatusOr<StageMemory> Create(const StageModel* stage, const ZeroOptions& options,
                                            const RankSchedule& schedule, Device* device);

  // Of a unit that runs here, for a micro-batch between its forward and its backward.
  void* Kept(int unit, int64_t micro_batch) const;
  void* scratch() const { return scratch_; }
  // The two that a gradient goes through from unit to unit.
  const std::array<void*, 2>& gradients() const { return gradients_; }
  int64_t boundary_bytes() const { return boundary_bytes_; }

  // The place of a virtual stage's input, or of the gradient of its output.
  BoundarySlot& Slot(int virtual_stage, int64_t micro_batch, bool gradient);
  // A buffer for an output that leaves; taken in turns.
  BoundarySlot& NextOutput();
  // That in which the output of the virtual stage and micro-batch lies.
  BoundarySlot* FindOutput(int virtual_stage, int64_t micro_batch, bool gradient);
  void NameOutput(BoundarySlot* output, int virtual_stage, int64_t micro_batch, bool gradient);

  // Waits for every event, on the host; the first error. Nothing is on its way then.
  absl::Status Drain();

 private:
  // Of one virtual stage of this rank.
  struct Places {
    int64_t alive = 0;
    int64_t bytes = 0;            // of one micro-batch
    char* kept = nullptr;         // [alive][bytes]
    std::vector<int64_t> offset;  // by unit, from the stage's first
    std::vector<BoundarySlot> input, gradient;
  };
  struct Output {
    BoundarySlot slot;
    int virtual_stage = -1;
    int64_t micro_batch = 0;
    bool gradient = false;
  };
  void AddStage(const ZeroOptions& options, const RankSchedule& schedule, int virtual_stage,
                char** at, int64_t* scratch);
  Places& Of(int virtual_stage) {
    return places_[static_cast<size_t>(virtual_stage / stage_->stages.pipeline)];
  }
  const Places& Of(int virtual_stage) const {
    return places_[static_cast<size_t>(virtual_stage / stage_->stages.pipeline)];
  }

  const StageModel* stage_ = nullptr;
  int64_t boundary_bytes_ = 0;
  Buffer memory_;
  std::vector<Places> places_;  // virtual stages rank, rank + p, ...
  std::vector<Output> outputs_;
  size_t next_output_ = 0;
  void* scratch_ = nullptr;
  std::array<void*, 2> gradients_{};
};

}  // namespace zeroshard
