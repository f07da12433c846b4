#include "worker/train/stage_memory.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/plan/activation_table.h"
#include "common/status_macros.h"

namespace zeroshard {

void StageMemory::AddStage(const ZeroOptions& options, const RankSchedule& schedule,
                           int virtual_stage, char** at, int64_t* scratch) {
  Places& places = places_.emplace_back();
  for (int u = stage_->stages.Begin(virtual_stage); u < stage_->stages.End(virtual_stage); ++u) {
    const ActivationTable table =
        MakeActivationTable(stage_->model.config, stage_->model.units[static_cast<size_t>(u)].kind,
                            options.micro_batch, options.dtype, options.checkpointing);
    places.offset.push_back(places.bytes);
    places.bytes += table.kept_bytes;
    *scratch = std::max(*scratch, table.scratch_bytes);
  }
  places.alive = MostAlive(schedule, virtual_stage);
  places.kept = *at;
  *at += places.alive * places.bytes;
  const auto carve = [&](int64_t slots, std::vector<BoundarySlot>* out) {
    for (int64_t i = 0; i < slots; ++i, *at += boundary_bytes_) out->push_back({.data = *at});
  };
  carve(InputSlots(schedule, virtual_stage), &places.input);
  carve(GradientSlots(schedule, virtual_stage), &places.gradient);
}

absl::StatusOr<StageMemory> StageMemory::Create(const StageModel* stage, const ZeroOptions& options,
                                                const RankSchedule& schedule, Device* device) {
  StageMemory memory;
  memory.stage_ = stage;
  memory.boundary_bytes_ = BoundaryBytes(stage->model.config, options);
  const int64_t bytes = StageActivationBytes(*stage, options, schedule);
  ZS_ASSIGN_OR_RETURN(memory.memory_,
                      device->Allocate(static_cast<size_t>(bytes), MemoryKind::kActivations));
  char* at = memory.memory_.as<char>();
  int64_t scratch = 0;
  for (int k = stage->rank; k < stage->stages.Count(); k += stage->stages.pipeline)
    memory.AddStage(options, schedule, k, &at, &scratch);
  for (int i = 0; i < OutputSlots(schedule.shape); ++i, at += memory.boundary_bytes_)
    memory.outputs_.push_back({.slot = {.data = at}});
  for (void*& gradient : memory.gradients_) {
    gradient = at;
    at += memory.boundary_bytes_;
  }
  memory.scratch_ = at;
  if (at + scratch != memory.memory_.as<char>() + bytes) {
    return absl::InternalError(absl::StrFormat(
        "the activation plan of %d bytes of pipeline rank %d does not match its tables", bytes,
        stage->rank));
  }
  return memory;
}

void* StageMemory::Kept(int unit, int64_t micro_batch) const {
  const int k = stage_->stages.StageOf(unit);
  const Places& places = Of(k);
  return places.kept + micro_batch % places.alive * places.bytes +
         places.offset[static_cast<size_t>(unit - stage_->stages.Begin(k))];
}

BoundarySlot& StageMemory::Slot(int virtual_stage, int64_t micro_batch, bool gradient) {
  Places& places = Of(virtual_stage);
  std::vector<BoundarySlot>& slots = gradient ? places.gradient : places.input;
  return slots[static_cast<size_t>(micro_batch) % slots.size()];
}

BoundarySlot& StageMemory::NextOutput() {
  Output& output = outputs_[next_output_];
  next_output_ = (next_output_ + 1) % outputs_.size();
  output.virtual_stage = -1;
  return output.slot;
}

void StageMemory::NameOutput(BoundarySlot* slot, int virtual_stage, int64_t micro_batch,
                             bool gradient) {
  for (Output& output : outputs_) {
    if (&output.slot != slot) continue;
    output.virtual_stage = virtual_stage;
    output.micro_batch = micro_batch;
    output.gradient = gradient;
  }
}

BoundarySlot* StageMemory::FindOutput(int virtual_stage, int64_t micro_batch, bool gradient) {
  for (Output& output : outputs_) {
    if (output.virtual_stage == virtual_stage && output.micro_batch == micro_batch &&
        output.gradient == gradient) {
      return &output.slot;
    }
  }
  return nullptr;
}

absl::Status StageMemory::Drain() {
  absl::Status status;
  const auto wait = [&status](BoundarySlot& slot) {
    status.Update(slot.filled.Wait());
    status.Update(slot.read.Wait());
    slot.filled = slot.read = Event();
  };
  for (Places& places : places_) {
    for (BoundarySlot& slot : places.input) wait(slot);
    for (BoundarySlot& slot : places.gradient) wait(slot);
  }
  for (Output& output : outputs_) {
    wait(output.slot);
    output.virtual_stage = -1;  // the next step has micro-batches of the same numbers
  }
  return status;
}

}  // namespace zeroshard
