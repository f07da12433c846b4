#include "worker/train/pipeline_runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/status_macros.h"
#include "worker/device/host_event.h"

namespace zeroshard {

PipelineRunner::PipelineRunner(const PipelineParts& parts, StageMemory memory)
    : parts_(parts),
      compute_(parts.device->compute()),
      memory_(std::move(memory)),
      batches_(static_cast<size_t>(OpenMicroBatches(*parts.schedule))),
      slots_(std::max(parts.policy->rounds, kLeastSums)) {}

PipelineRunner::~PipelineRunner() { Drain().IgnoreError(); }

absl::Status PipelineRunner::Drain() {
  absl::Status status = memory_.Drain();
  if (parts_.group != nullptr) status.Update(parts_.group->Drain());
  return status;
}

absl::StatusOr<std::unique_ptr<PipelineRunner>> PipelineRunner::Create(const PipelineParts& parts) {
  ZS_ASSIGN_OR_RETURN(StageMemory memory, StageMemory::Create(parts.stage, parts.policy->options,
                                                              *parts.schedule, parts.device));
  std::unique_ptr<PipelineRunner> runner(new PipelineRunner(parts, std::move(memory)));
  const size_t sums = static_cast<size_t>(runner->slots_) * sizeof(MicroBatchSums);
  ZS_ASSIGN_OR_RETURN(runner->sums_, parts.device->Allocate(sums, MemoryKind::kBuffers));
  ZS_ASSIGN_OR_RETURN(runner->read_sums_, parts.device->AllocateHost(sums));
  // Of fewer micro-batches no more are open.
  ZS_ASSIGN_OR_RETURN(const ForwardPass* pass, runner->PassOf(runner->slots_));
  runner->open_losses_ = OpenMicroBatches(pass->schedule);
  if (static_cast<size_t>(runner->open_losses_) > runner->batches_.size())
    runner->batches_.resize(static_cast<size_t>(runner->open_losses_));
  return runner;
}

absl::StatusOr<const PipelineRunner::ForwardPass*> PipelineRunner::PassOf(int64_t micro_batches) {
  const auto [found, added] = passes_.try_emplace(micro_batches);
  ForwardPass& pass = found->second;
  if (!added) return &pass;
  PipelineShape shape = parts_.schedule->shape;
  shape.micro_batches = micro_batches;
  ZS_ASSIGN_OR_RETURN(std::vector<RankSchedule> schedules, MakeForwardSchedule(shape));
  pass.schedule = std::move(schedules[static_cast<size_t>(parts_.schedule->rank)]);
  pass.uses = EvaluationUses(*parts_.stage, *parts_.policy, pass.schedule);
  return &pass;
}

absl::Status PipelineRunner::Step(uint64_t step, const Load& load, const Progress& progress,
                                  const std::atomic<bool>& stop) {
  step_ = step;
  evaluating_ = false;
  return RunAll(*parts_.schedule, load, progress, stop);
}

absl::StatusOr<absl::Span<const MicroBatchSums>> PipelineRunner::Losses(
    uint64_t step, int64_t n, const Load& load, const Progress& progress,
    const std::atomic<bool>& stop) {
  ZS_ASSIGN_OR_RETURN(const ForwardPass* pass, PassOf(n));
  step_ = step;
  evaluating_ = true;
  parts_.engine->BeginEvaluation(step, &pass->uses);
  ZS_RETURN_IF_ERROR(RunAll(pass->schedule, load, progress, stop));
  return ReadSums(n);
}

absl::Status PipelineRunner::RunAll(const RankSchedule& schedule, const Load& load,
                                    const Progress& progress, const std::atomic<bool>& stop) {
  loaded_ = 0;
  parts_.ops->Zero(sums_.data(), sums_.bytes());
  for (const Action& action : schedule.actions) {
    if (stop) return absl::CancelledError("stopped");
    ZS_RETURN_IF_ERROR(Run(action, load, progress));
  }
  // The last outputs are to be gone before the step's end is exchanged and counted.
  const bool stages = parts_.schedule->shape.stages > 1;
  Waiting waiting(waits_, stages ? WaitKind::kStages : WaitKind::kRanks);
  return Drain();
}

absl::Status PipelineRunner::Run(const Action& action, const Load& load, const Progress& progress) {
  if (action.kind == ActionKind::kTransfers) {
    Transfers(action.transfers);
    return absl::OkStatus();
  }
  for (; loaded_ <= action.micro_batch; ++loaded_) {
    progress(StepPhase::kData, evaluating_ ? "evaluation" : "");
    ZS_ASSIGN_OR_RETURN(batches_[static_cast<size_t>(loaded_) % batches_.size()], load(loaded_));
  }
  if (!evaluating_) parts_.engine->BeginRound(action.micro_batch);
  return action.kind == ActionKind::kForward ? Forward(action, progress)
                                             : Backward(action, progress);
}

void PipelineRunner::Transfers(const std::vector<StageTransfer>& transfers) {
  const int64_t bytes = BoundaryElements(parts_.stage->model.config, parts_.policy->options) *
                        static_cast<int64_t>(SizeOf(parts_.policy->options.dtype));
  std::vector<Message> messages;
  std::vector<Event> after;
  std::vector<Event*> done;
  for (const StageTransfer& t : transfers) {
    BoundarySlot& slot = t.send ? *memory_.FindOutput(t.virtual_stage, t.micro_batch, t.gradient)
                                : memory_.Slot(t.To(), t.micro_batch, t.gradient);
    after.push_back(t.send ? slot.filled : slot.read);
    done.push_back(t.send ? &slot.read : &slot.filled);
    messages.push_back({.send = t.send,
                        .buffer = slot.data,
                        .bytes = bytes,
                        .peer = t.peer,
                        .phase = t.gradient ? Phase::kBackward : Phase::kForward});
  }
  const StageTransfer& first = transfers.front();
  const std::string what = absl::StrFormat("%s of virtual stage %d, micro-batch %d",
                                           first.gradient ? "gradient" : "output",
                                           first.virtual_stage, first.micro_batch);
  const Event exchanged = parts_.line->Exchange(
      std::move(messages),
      {.phase = first.gradient ? Phase::kBackward : Phase::kForward, .unit = what, .step = step_},
      AllOf(after));
  for (Event* event : done) *event = exchanged;
}

absl::StatusOr<BoundarySlot*> PipelineRunner::Input(int virtual_stage, int64_t micro_batch,
                                                    bool gradient) {
  BoundarySlot* slot = &memory_.Slot(virtual_stage, micro_batch, gradient);
  if (slot->filled.state() == nullptr) return slot;  // by this rank, on the compute stream
  Waiting waiting(waits_, WaitKind::kStages);
  ZS_RETURN_IF_ERROR(compute_->WaitFor(slot->filled));
  return slot;
}

absl::StatusOr<BoundarySlot*> PipelineRunner::Output(int virtual_stage, int64_t micro_batch,
                                                     bool gradient) {
  if (parts_.schedule->shape.stages == 1)
    return &memory_.Slot(gradient ? virtual_stage - 1 : virtual_stage + 1, micro_batch, gradient);
  BoundarySlot* slot = &memory_.NextOutput();
  Waiting waiting(waits_, WaitKind::kStages);
  ZS_RETURN_IF_ERROR(compute_->WaitFor(slot->read));
  memory_.NameOutput(slot, virtual_stage, micro_batch, gradient);
  return slot;
}

UnitContext PipelineRunner::Context(int unit, int64_t micro_batch) const {
  UnitContext context;
  context.ops = parts_.ops;
  context.dtype = parts_.policy->options.dtype;
  context.kept = memory_.Kept(unit, micro_batch);
  context.scratch = memory_.scratch();
  return context;
}

absl::Status PipelineRunner::Forward(const Action& action, const Progress& progress) {
  const int k = action.virtual_stage;
  const int64_t i = action.micro_batch;
  const int begin = parts_.stage->stages.Begin(k);
  // In training the head belongs to the backward.
  const bool last = k + 1 == parts_.stage->stages.Count();
  const int end = parts_.stage->stages.End(k) - (last ? 1 : 0);
  if (k > 0) {
    progress(StepPhase::kForward, UnitName(begin));
    ZS_ASSIGN_OR_RETURN(BoundarySlot * input, Input(k, i, false));
    parts_.ops->Copy(memory_.Kept(begin, i), input->data,
                     static_cast<size_t>(memory_.boundary_bytes()));
    input->read = compute_->Record();
  }
  BoundarySlot* output = nullptr;
  for (int u = begin; u < end; ++u) {
    progress(StepPhase::kForward, UnitName(u));
    ZS_ASSIGN_OR_RETURN(const UnitParameters parameters, parts_.engine->BeforeForward(u));
    if (u + 1 == end && !last) {
      ZS_ASSIGN_OR_RETURN(output, Output(k, i, false));
    }
    void* y = output != nullptr ? output->data : memory_.Kept(u + 1, i);
    if (u == 0) {
      ZS_RETURN_IF_ERROR(
          parts_.units->embedding->Forward(Context(u, i), parameters.own, Batch(i), y));
    } else {
      ZS_RETURN_IF_ERROR(parts_.units->blocks[static_cast<size_t>(u) - 1]->Forward(
          Context(u, i), parameters.own, Batch(i), memory_.Kept(u, i), y));
    }
    ZS_RETURN_IF_ERROR(parts_.engine->AfterForward(u));
  }
  if (output != nullptr && parts_.line != nullptr) output->filled = compute_->Record();
  return last && evaluating_ ? Loss(end, i, progress) : absl::OkStatus();
}

absl::Status PipelineRunner::Loss(int unit, int64_t micro_batch, const Progress& progress) {
  progress(StepPhase::kForward, UnitName(unit));
  ZS_ASSIGN_OR_RETURN(const UnitParameters parameters, parts_.engine->BeforeForward(unit));
  MicroBatchSums* sums = sums_.as<MicroBatchSums>() + micro_batch;
  ZS_RETURN_IF_ERROR(parts_.units->head->Loss(Context(unit, micro_batch), parameters.own,
                                              parameters.lm_head, Batch(micro_batch),
                                              memory_.Kept(unit, micro_batch), &sums->loss));
  return parts_.engine->AfterForward(unit);
}

absl::Status PipelineRunner::Head(int unit, int64_t micro_batch, void* dx,
                                  const Progress& progress) {
  ZeroEngine& engine = *parts_.engine;
  progress(StepPhase::kBackward, UnitName(unit));
  ZS_ASSIGN_OR_RETURN(const UnitParameters parameters, engine.BeforeForward(unit));
  MicroBatchSums* sums = sums_.as<MicroBatchSums>() + micro_batch;
  ZS_RETURN_IF_ERROR(parts_.units->head->LossAndBackward(
      Context(unit, micro_batch), parameters.own, parameters.lm_head, Batch(micro_batch),
      memory_.Kept(unit, micro_batch), dx, engine.Sink(unit), engine.Sink(engine.HeadMatrixUnit()),
      engine.HeadMatrixOffset(), &sums->loss));
  return engine.AfterBackward(unit);
}

absl::Status PipelineRunner::Embedding(int64_t micro_batch, const void* dy,
                                       const Progress& progress) {
  ZeroEngine& engine = *parts_.engine;
  progress(StepPhase::kBackward, UnitName(0));
  ZS_RETURN_IF_ERROR(parts_.units->embedding->Backward(Context(0, micro_batch), Batch(micro_batch),
                                                       dy, engine.rows()->ids(),
                                                       engine.rows()->rows(), engine.Sink(0)));
  ZS_RETURN_IF_ERROR(engine.AfterBackward(0));
  const ZeroOptions& options = parts_.policy->options;
  MicroBatchSums* sums = sums_.as<MicroBatchSums>() + micro_batch;
  parts_.ops->AddSquares(dy, BoundaryElements(parts_.stage->model.config, options), options.dtype,
                         &sums->inputs);
  return absl::OkStatus();
}

absl::Status PipelineRunner::Backward(const Action& action, const Progress& progress) {
  const int k = action.virtual_stage;
  const int64_t i = action.micro_batch;
  const int begin = parts_.stage->stages.Begin(k), end = parts_.stage->stages.End(k);
  BoundarySlot* input = nullptr;
  BoundarySlot* output = nullptr;
  const void* dy = nullptr;
  if (k + 1 < parts_.stage->stages.Count()) {
    progress(StepPhase::kBackward, UnitName(end - 1));
    ZS_ASSIGN_OR_RETURN(input, Input(k, i, true));
    dy = input->data;
  }
  for (int u = end - 1; u >= begin; --u) {
    if (u == 0) {
      ZS_RETURN_IF_ERROR(Embedding(i, dy, progress));
      break;
    }
    void* dx = memory_.gradients()[static_cast<size_t>(u % 2)];
    if (u == begin) {
      ZS_ASSIGN_OR_RETURN(output, Output(k, i, true));
      dx = output->data;
    }
    if (u + 1 == end && input == nullptr) {
      ZS_RETURN_IF_ERROR(Head(u, i, dx, progress));
    } else {
      progress(StepPhase::kBackward, UnitName(u));
      ZS_ASSIGN_OR_RETURN(const UnitParameters parameters, parts_.engine->BeforeBackward(u));
      ZS_RETURN_IF_ERROR(parts_.units->blocks[static_cast<size_t>(u) - 1]->Backward(
          Context(u, i), parameters.own, Batch(i), memory_.Kept(u, i), dy, dx,
          parts_.engine->Sink(u)));
      ZS_RETURN_IF_ERROR(parts_.engine->AfterBackward(u));
    }
    dy = dx;
  }
  const Event computed = compute_->Record();
  if (input != nullptr) input->read = computed;
  if (output != nullptr && parts_.line != nullptr) output->filled = computed;
  return absl::OkStatus();
}

absl::StatusOr<absl::Span<const MicroBatchSums>> PipelineRunner::ReadSums(int64_t n) {
  ZS_RETURN_IF_ERROR(CopyAndWait(parts_.device, read_sums_.data(), sums_.data(),
                                 static_cast<size_t>(n) * sizeof(MicroBatchSums)));
  ZS_RETURN_IF_ERROR(compute_->Record().Wait());  // of the kernels that made them
  return absl::MakeConstSpan(read_sums_.as<MicroBatchSums>(), static_cast<size_t>(n));
}

}  // namespace zeroshard
