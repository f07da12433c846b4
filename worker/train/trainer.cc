#include "worker/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/crash_point.h"
#include "common/hf/config.h"
#include "common/kernels/init.h"
#include "common/plan/planner.h"
#include "common/spec/decision.h"
#include "common/spec/loss_scale.h"
#include "common/spec/schedule.h"
#include "common/status_macros.h"
#include "common/status_payloads.h"
#include "worker/train/batch_buffers.h"
#include "worker/train/evaluator.h"
#include "worker/train/mesh_tensors.h"
#include "worker/train/model_runner.h"
#include "worker/train/phase_clock.h"
#include "worker/train/pipeline_rank.h"
#include "worker/train/pipeline_runner.h"
#include "worker/train/restore.h"
#include "worker/train/samples.h"
#include "worker/train/save_loop.h"
#include "worker/train/step_stats.h"
#include "worker/zero/sliced_source.h"

namespace zeroshard {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;

uint64_t NanosecondsSince(SteadyTime start) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start)
          .count());
}

// The waits of engine, pipeline and tensor group (both may be null) are the observer's for as long
// as this lives.
class ObservedWaits {
 public:
  ObservedWaits(ZeroEngine* engine, PipelineRunner* pipeline, TensorGroup* group,
                WaitObserver* observer)
      : engine_(engine), pipeline_(pipeline), group_(group) {
    Set(observer);
  }
  ~ObservedWaits() { Set(nullptr); }
  ObservedWaits(const ObservedWaits&) = delete;
  ObservedWaits& operator=(const ObservedWaits&) = delete;

 private:
  void Set(WaitObserver* observer) {
    engine_->SetWaitObserver(observer);
    if (pipeline_ != nullptr) pipeline_->SetWaitObserver(observer);
    if (group_ != nullptr) group_->SetWaitObserver(observer);
  }
  ZeroEngine* const engine_;
  PipelineRunner* const pipeline_;
  TensorGroup* const group_;
};

// The clock's waits, of which a mesh's rank also tells: its phase does not say whether it computes
// or waits for a rank of another stage or of its tensor group.
class ToldWaits : public WaitObserver {
 public:
  ToldWaits(PhaseClock* clock, TrainObserver* observer) : clock_(*clock), observer_(*observer) {}
  void BeginWait(WaitKind kind) override {
    clock_.BeginWait(kind);
    if (kind != WaitKind::kStores) observer_.OnWait(true);
  }
  void EndWait() override {
    observer_.OnWait(false);
    clock_.EndWait();
  }

 private:
  PhaseClock& clock_;
  TrainObserver& observer_;
};

// Of everything that a rank sends on, each once.
std::vector<const TrafficCounters*> CountersOf(const TrainerOptions& options) {
  const TrainerMesh& mesh = options.mesh;
  std::vector<const TrafficCounters*> counters;
  for (const Communicator* line :
       {options.comm, mesh.pipeline, mesh.tensor, mesh.copies, mesh.job}) {
    if (line == nullptr) continue;
    const TrafficCounters* own = &line->traffic();
    if (std::find(counters.begin(), counters.end(), own) == counters.end()) counters.push_back(own);
  }
  return counters;
}

// Whether the checkpoint is one of those in `dir`.
bool IsIn(const std::string& checkpoint, const std::string& dir) {
  if (checkpoint.empty() || dir.empty()) return false;
  std::error_code error;
  return std::filesystem::equivalent(std::filesystem::path(checkpoint) / "..", dir, error) &&
         !error;
}

class TrainerImpl : public Trainer {
 public:
  explicit TrainerImpl(const TrainerOptions& options)
      : options_(options),
        job_(options.mesh.job != nullptr ? options.mesh.job : options.comm),
        order_(options.data->sample_count(), options.spec.seed()),
        meter_(CountersOf(options),
               options.store == nullptr ? nullptr : &options.store->counters()) {
    if (options_.files == nullptr) options_.files = &FileSystem::Real();
  }

  absl::Status Init() {
    const v1::JobSpec& spec = options_.spec;
    if (options_.first_step > spec.steps() + 1) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "the job has %d steps, and the checkpoint to go on from is of step %d; raise steps",
          spec.steps(), options_.first_step - 1));
    }
    ZS_RETURN_IF_ERROR(CheckStore());
    ZS_RETURN_IF_ERROR(CheckSaves());
    ZS_ASSIGN_OR_RETURN(whole_, MakeModelTable(spec.model()));
    whole_.config.sequence_parallel = spec.parallel().sequence_parallel();
    ZS_RETURN_IF_ERROR(MakeUnits());
    for (const UnitTable& unit : whole_.units) unit_names_.push_back(unit.name);
    TrainerOptions together = options_;  // all ranks open and load together
    together.comm = job_;
    ZS_ASSIGN_OR_RETURN(const InitialState initial, InitialState::Open(together, whole_));
    position_ = initial.position();
    loss_scale_ = initial.loss_scale();
    ZS_RETURN_IF_ERROR(Fill(initial, together));
    ZS_RETURN_IF_ERROR(MakeRunner());
    exchange_ = std::make_unique<StepExchange>(policy_.options.micro_batches,
                                               policy_.options.micro_batch, Shape(), job_);
    ZS_RETURN_IF_ERROR(MakeEvaluator());
    ZS_RETURN_IF_ERROR(MakeSampleWriter());
    return MakeSaves(initial);
  }

  absl::Status Run(TrainObserver* observer, const std::atomic<bool>& stop) override {
    absl::Status status = Train(observer, stop);
    // Every rank came to this verdict from the same bytes, and all are here: a checkpoint on its
    // way is of a step that was good, and may be the only one.
    if (IsNonFinite(status) && saves_ != nullptr) saves_->EndPending(step_, observer, stop);
    return status;
  }

  absl::StatusOr<std::string> WeightsDigest() override { return engine_->WeightsDigest(); }
  absl::Status SetTensor(const std::string& name, absl::Span<const float> values) override {
    const bool elsewhere = FindTensor(whole_, name) && !FindTensor(model_.table, name);
    return elsewhere ? absl::OkStatus() : engine_->SetTensor(name, values);
  }
  absl::StatusOr<std::vector<float>> GatherTensor(const std::string& name) override {
    const std::optional<TensorPlace> place = FindTensor(whole_, name);
    Communicator* const line = options_.mesh.pipeline;
    if (!mesh_.has_value() || line == nullptr || !place.has_value()) return StageTensor(name);
    const PipelineStages& stages = mesh_->stage.stages;
    const int home = stages.RankOf(stages.StageOf(static_cast<int>(place->unit)));
    const int64_t size = place->In(whole_).size;
    std::vector<float> all(static_cast<size_t>(size * line->size()));
    if (home == line->rank()) {
      ZS_ASSIGN_OR_RETURN(const std::vector<float> values, StageTensor(name));
      std::copy(values.begin(), values.end(), all.begin() + home * size);
    }
    ZS_RETURN_IF_ERROR(line->AllGatherHost(all.data(), size * static_cast<int64_t>(sizeof(float)),
                                           {.unit = name, .step = step_}));
    return std::vector<float>(all.begin() + home * size, all.begin() + (home + 1) * size);
  }
  absl::StatusOr<std::vector<float>> StageTensor(const std::string& name) override {
    ZS_ASSIGN_OR_RETURN(std::vector<float> own, engine_->GatherTensor(name));
    if (!group_.has_value()) return own;
    return JoinSlices(whole_, *FindTensor(whole_, name), own, options_.mesh.tensor, step_);
  }
  const TrainCounters& counters() const override { return counters_; }
  StepTraffic last_step() const override { return meter_.last(); }
  BubbleShares bubble() const override { return bubble_; }

 private:
  bool IsRankZero() const { return job_->rank() == 0; }
  MeshShape Shape() const {
    return mesh_.has_value() ? options_.mesh.shape : MeshShape{.data = options_.comm->size()};
  }
  bool HasStages() const { return mesh_.has_value() && options_.mesh.shape.pipeline > 1; }
  // Whether this rank has the losses; with it all of its tensor group.
  bool HasHead() const { return !mesh_.has_value() || mesh_->stage.HasHead(); }

  // What this rank computes, and what its engine will do.
  absl::Status MakeUnits() {
    const v1::JobSpec& spec = options_.spec;
    if (!IsMesh(options_.mesh)) {
      model_ = MakeModel(whole_, spec.activation_checkpointing());
      policy_ = MakeZeroPolicy(model_.table, MakeZeroOptions(spec, options_.comm->size()));
      return absl::OkStatus();
    }
    ZS_ASSIGN_OR_RETURN(mesh_, MakePipelineRank(options_, whole_));
    if (options_.mesh.shape.tensor > 1) {
      group_.emplace(options_.mesh.tensor, options_.mesh.copies, options_.device->compute());
    }
    model_ = MakeStageUnits(*mesh_, spec.activation_checkpointing(), Group());
    policy_ = mesh_->policy;
    bubble_ = BubbleOf(*mesh_, whole_.config, spec.activation_checkpointing());
    return absl::OkStatus();
  }

  // Null where the rank's tensor line is itself.
  TensorGroup* Group() { return group_.has_value() ? &*group_ : nullptr; }

  absl::Status MakeRunner() {
    if (mesh_.has_value()) {
      const PipelineParts parts{.stage = &mesh_->stage,
                                .schedule = &mesh_->schedule,
                                .policy = &policy_,
                                .units = &model_,
                                .engine = engine_.get(),
                                .device = options_.device,
                                .ops = options_.ops,
                                .line = options_.mesh.pipeline,
                                .group = Group()};
      ZS_ASSIGN_OR_RETURN(pipeline_runner_, PipelineRunner::Create(parts));
    } else {
      ZS_ASSIGN_OR_RETURN(runner_, ModelRunner::Create(&model_, &policy_, engine_.get(),
                                                       options_.device, options_.ops));
    }
    const int64_t open = mesh_.has_value() ? OpenMicroBatches(mesh_->schedule) : 1;
    for (int64_t i = 0; i < open; ++i) {
      ZS_ASSIGN_OR_RETURN(std::unique_ptr<BatchBuffers> buffers,
                          BatchBuffers::Create(policy_.options.micro_batch,
                                               model_.table.config.sequence, options_.device));
      buffers_.push_back(std::move(buffers));
    }
    return absl::OkStatus();
  }

  absl::Status Train(TrainObserver* observer, const std::atomic<bool>& stop) {
    PhaseClock clock(&counters_, options_.device);
    ToldWaits told(&clock, observer);
    WaitObserver* const waits = mesh_.has_value() ? static_cast<WaitObserver*>(&told) : &clock;
    const ObservedWaits observed(engine_.get(), pipeline_runner_.get(), Group(), waits);
    return Steps(observer, stop, &clock);
  }

  absl::Status Steps(TrainObserver* observer, const std::atomic<bool>& stop, PhaseClock* clock) {
    const uint64_t last = options_.spec.steps();
    if (options_.evaluate && evaluator_ != nullptr)
      ZS_RETURN_IF_ERROR(EvaluateBase(observer, stop, clock));
    for (uint64_t step = options_.first_step; step <= last; ++step) {
      step_ = step;
      clock->BeginStep(step);
      const SteadyTime start = std::chrono::steady_clock::now();
      ZS_ASSIGN_OR_RETURN(const StepTotals totals, Step(step, observer, stop, clock));
      meter_.Mark(step);
      if (MoreTravels(step, totals)) meter_.Spoil();
      ZS_RETURN_IF_ERROR(Update(step, totals, start, observer, clock));
      SaveRequest request = Requested();
      v1::StepRecord record = MakeRecord(step, totals, start);
      if (evaluator_ != nullptr && IsDue(options_.spec.eval().interval_steps(), step)) {
        ZS_ASSIGN_OR_RETURN(const double loss, Evaluate(step, observer, stop, clock));
        record.set_eval_loss(loss);
      }
      observer->OnStep(record);
      if (totals.hold) {
        ZS_ASSIGN_OR_RETURN(const SaveRequest held, Hold(step, observer, stop));
        request = std::max(request, held);
      }
      clock->Enter(StepPhase::kBarrier, "");
      ZS_RETURN_IF_ERROR(SaveIfDue(step, request, observer, stop));
      if (request == SaveRequest::kSaveAndStop && step < last) return Leave(step, observer, stop);
      if (samples_ != nullptr && IsDue(options_.spec.sample().interval_steps(), step))
        ZS_RETURN_IF_ERROR(WriteSamples(step, observer, stop, clock));
    }
    // Also of a run that had nothing left to train.
    if (saves_ != nullptr) ZS_RETURN_IF_ERROR(FinishSave(last, observer, stop));
    return engine_->Drain();
  }

  // Whether from the exchange that ended `step` to the next one anything is sent that no plain step
  // sends; or less, where an update is left out.
  bool MoreTravels(uint64_t step, const StepTotals& totals) const {
    const v1::JobSpec& spec = options_.spec;
    const bool saving =
        saves_ != nullptr && (!AllIdle(exchange_->flags()) || Requested() != SaveRequest::kNone ||
                              IsDue(spec.checkpoint().interval_steps(), step));
    return saving || totals.hold || totals.overflow ||
           (evaluator_ != nullptr && IsDue(spec.eval().interval_steps(), step)) ||
           (samples_ != nullptr && IsDue(spec.sample().interval_steps(), step));
  }

  absl::Status CheckStore() const {
    if (IsOffloaded(options_.spec) != (options_.store != nullptr)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "zero_optimization.offload_optimizer.device is \"%s\", and the rank was given %s shard "
          "stores",
          options_.spec.zero_optimization().offload_optimizer().device(),
          options_.store != nullptr ? "" : "no"));
    }
    if (options_.store == nullptr || options_.store->base().step() + 1 == options_.first_step)
      return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat(
        "asked to begin at step %d, but the stores begin with the state after step "
        "%d; wanted %d",
        options_.first_step, options_.store->base().step(), options_.store->base().step() + 1));
  }

  // What every save would fail at.
  absl::Status CheckSaves() const {
    const v1::JobSpec& spec = options_.spec;
    if (spec.checkpoint().dir().empty() ||
        !spec.zero_optimization().stage3_gather_16bit_weights_on_model_save()) {
      return absl::OkStatus();
    }
    const absl::Status status = CheckExportable(spec.model());
    if (status.ok()) return status;
    return absl::Status(
        status.code(),
        absl::StrCat("zero_optimization.stage3_gather_16bit_weights_on_model_save is true, but the "
                     "model cannot be written as a Hugging Face folder: ",
                     status.message()));
  }

  absl::Status Fill(const InitialState& initial, const TrainerOptions& together) {
    const EngineLinks links{
        .job = job_,
        .pipeline = options_.mesh.pipeline,
        .tied_peer = mesh_.has_value() ? mesh_->stage.tied_peer : -1,
        .slice = group_.has_value() ? &mesh_->slice : nullptr,
    };
    const FreshWeights fresh(options_.spec.seed());
    return initial.Fill(
        together, whole_,
        [&](const ParameterSource* weights, const std::atomic<bool>* stop) {
          std::optional<SlicedSource> sliced;
          if (group_.has_value()) {
            const ParameterSource* of = weights != nullptr ? weights : &fresh;
            weights = &sliced.emplace(&whole_, &mesh_->slice, of);
          }
          return ZeroEngine::Create(&model_.table, &policy_, options_.spec.seed(), options_.device,
                                    options_.ops, options_.comm, stop, weights, options_.store,
                                    &links);
        },
        &engine_);
  }

  absl::Status MakeEvaluator() {
    if (options_.spec.eval().data_size() == 0) return absl::OkStatus();
    if (options_.eval_data == nullptr)
      return absl::InvalidArgumentError("the job has eval.data, but no evaluation set was opened");
    LossRunner* runner = runner_.get();
    if (pipeline_runner_ != nullptr) runner = pipeline_runner_.get();
    ZS_ASSIGN_OR_RETURN(evaluator_, Evaluator::Create(options_.spec, options_.eval_data, runner,
                                                      Shape(), options_.device, job_));
    return absl::OkStatus();
  }

  absl::Status MakeSampleWriter() {
    if (options_.spec.sample().prompts_size() == 0) return absl::OkStatus();
    if (options_.tokenizer == nullptr)
      return absl::InvalidArgumentError("the job has sample.prompts, but no tokenizer was loaded");
    ZS_ASSIGN_OR_RETURN(
        samples_, SampleWriter::Create(options_.spec, options_.tokenizer, FindModelFolder(options_),
                                       &model_, engine_.get(), options_.device, options_.ops));
    return absl::OkStatus();
  }

  absl::Status MakeSaves(const InitialState& initial) {
    if (options_.spec.checkpoint().dir().empty() || options_.store != nullptr)
      return absl::OkStatus();
    CheckpointerOptions checkpointer;
    checkpointer.spec = options_.spec;
    checkpointer.job = options_.job;
    checkpointer.run_id = options_.run_id;
    checkpointer.resumed_from = initial.resumed_from();
    checkpointer.samples = static_cast<uint64_t>(options_.data->sample_count());
    if (IsRankZero()) checkpointer.assets = FindAssets(options_);
    checkpointer.model = &whole_;
    checkpointer.engine = engine_.get();
    checkpointer.device = options_.device;
    checkpointer.comm = job_;
    checkpointer.files = options_.files;
    // What checkpoint.dir holds already needs no saving.
    const bool there = IsIn(initial.resumed_from(), options_.spec.checkpoint().dir());
    ZS_ASSIGN_OR_RETURN(
        saves_, SaveLoop::Create(checkpointer, exchange_.get(), there ? initial.step() : 0));
    return absl::OkStatus();
  }

  // Position in the run's sample order of the first sample of micro-batch j.
  int64_t Position(uint64_t step, int64_t j) const {
    const ZeroOptions& o = policy_.options;
    return position_ +
           (static_cast<int64_t>(step - options_.first_step) * o.micro_batches + j) * o.micro_batch;
  }

  // The run's position of the first sample after `step`.
  uint64_t NextSample(uint64_t step) const { return static_cast<uint64_t>(Position(step + 1, 0)); }
  // Of the step after the latest.
  NextStep Next(uint64_t step) const {
    return {.sample = NextSample(step), .loss_scale = loss_scale_};
  }

  // Whether something is done after this step that is done every so many and after the last.
  bool IsDue(uint64_t interval, uint64_t step) const {
    return step == options_.spec.steps() || (interval > 0 && step % interval == 0);
  }

  absl::StatusOr<LoadedBatch> Load(BatchBuffers* buffers, uint64_t step, int64_t j) {
    const int64_t first = Position(step, j);
    ZS_ASSIGN_OR_RETURN(LoadedBatch batch, buffers->Load(*options_.data, [&](int64_t i) {
      return order_.At(first + i);
    }));
    ZS_RETURN_IF_ERROR(options_.data->status());
    batch.mb.first_sample = first;
    return batch;
  }

  absl::Status Stopped() const { return absl::CancelledError("stopped"); }

  struct RoundBatch {
    LoadedBatch loaded;
    bool active = true;
  };
  // In a ragged last round a rank without a micro-batch repeats its calls on an earlier one's
  // tokens (zeros at first): the others wait for it in the collectives, and nobody uses what it
  // computes.
  absl::StatusOr<RoundBatch> LoadRound(uint64_t step, int64_t round, float gradient_scale) {
    BatchBuffers& buffers = *buffers_[static_cast<size_t>(round) % buffers_.size()];
    const int64_t j = round * options_.comm->size() + options_.comm->rank();
    RoundBatch batch{.loaded = {.mb = buffers.last()}, .active = j < policy_.options.micro_batches};
    if (batch.active) {
      ZS_ASSIGN_OR_RETURN(batch.loaded, Load(&buffers, step, j));
    }
    MicroBatch& mb = batch.loaded.mb;
    mb.seed = options_.spec.seed();
    mb.step = step;
    mb.dropout = true;
    mb.gradient_scale = gradient_scale;
    return batch;
  }

  // Tokens count where their loss is, of a tensor group on its first rank.
  void CountRound(const RoundBatch& batch, std::vector<RoundStats>* rounds) {
    if (!batch.active) return;
    const bool counts = HasHead() && (!group_.has_value() || group_->rank() == 0);
    const int64_t tokens = counts ? batch.loaded.tokens : 0;
    rounds->push_back({.tokens = tokens});
    counters_.tokens += static_cast<uint64_t>(tokens);
  }

  absl::StatusOr<StepTotals> Step(uint64_t step, TrainObserver* observer,
                                  const std::atomic<bool>& stop, PhaseClock* clock) {
    const auto progress = [&](StepPhase phase, const std::string& unit) {
      clock->Enter(phase, unit);
      observer->OnProgress(step, phase, unit);
    };
    std::vector<RoundStats> rounds;
    RankVerdict verdict;
    const StepScaling scaling{.gradient = GradientScale(options_.spec, loss_scale_),
                              .skips_overflow = !OverflowFails(options_.spec, loss_scale_)};
    engine_->BeginStep(step);
    if (pipeline_runner_ != nullptr) {
      const auto load = [&](int64_t round) -> absl::StatusOr<MicroBatch> {
        ZS_ASSIGN_OR_RETURN(const RoundBatch batch, LoadRound(step, round, scaling.gradient));
        CountRound(batch, &rounds);
        return batch.loaded.mb;
      };
      ZS_RETURN_IF_ERROR(pipeline_runner_->Step(step, load, progress, stop));
    }
    for (int64_t round = 0; round < policy_.rounds && runner_ != nullptr; ++round) {
      if (stop) return Stopped();
      progress(StepPhase::kData, "");
      engine_->BeginRound(round);
      ZS_ASSIGN_OR_RETURN(const RoundBatch batch, LoadRound(step, round, scaling.gradient));
      ZS_RETURN_IF_ERROR(runner_->ForwardBackward(batch.loaded.mb, round, progress));
      CountRound(batch, &rounds);
    }
    ZS_RETURN_IF_ERROR(ReadLosses(step, &rounds, &verdict));
    progress(StepPhase::kCommunication, "");
    std::string nonfinite_unit;
    ZS_ASSIGN_OR_RETURN(verdict.norm, engine_->FinishGradients(&nonfinite_unit));
    for (size_t u = 0; u < unit_names_.size(); ++u) {
      if (unit_names_[u] == nonfinite_unit) verdict.nonfinite_unit = static_cast<uint32_t>(u) + 1;
    }
    verdict.flags = OwnFlags(observer);
    auto totals = [&] {
      // Whose part of the pipeline is done waits here for the others'.
      const Waiting waiting(HasStages() ? clock : nullptr, WaitKind::kStages);
      return exchange_->Exchange(step, Position(step, 0), scaling, verdict, rounds, unit_names_);
    }();
    if (IsNonFinite(totals.status()) && UsesLossScale(options_.spec))
      return AtLeastScale(totals.status());
    return totals;
  }

  // Why an overflow is an error here.
  absl::Status AtLeastScale(const absl::Status& overflow) const {
    const bool fixed = options_.spec.fp16().loss_scale() != 0;
    absl::Status status(
        overflow.code(),
        absl::StrFormat("%s. The loss scale was %g, %s", overflow.message(), loss_scale_.scale(),
                        fixed ? "fp16.loss_scale: without it the scale follows the gradients"
                              : "which fp16.min_loss_scale lets fall no further"));
    overflow.ForEachPayload(
        [&](absl::string_view url, const absl::Cord& payload) { status.SetPayload(url, payload); });
    return status;
  }

  // The losses of this rank's micro-batches, and the first that is not finite.
  absl::Status ReadLosses(uint64_t step, std::vector<RoundStats>* rounds, RankVerdict* verdict) {
    ZS_ASSIGN_OR_RETURN(const absl::Span<const MicroBatchSums> sums,
                        pipeline_runner_ != nullptr
                            ? pipeline_runner_->Sums()
                            : runner_->Sums(static_cast<int64_t>(rounds->size())));
    for (size_t round = 0; round < rounds->size(); ++round) {
      (*rounds)[round].loss = sums[round].loss;
      const bool finite = std::isfinite(sums[round].loss) && sums[round].inputs.nonfinite == 0;
      if (finite || verdict->nonfinite_round != 0) continue;
      verdict->nonfinite_round = static_cast<uint32_t>(round) + 1;
      const auto j = static_cast<int64_t>(round) * options_.comm->size() + options_.comm->rank();
      verdict->nonfinite_sample = static_cast<uint64_t>(Position(step, j));
    }
    return absl::OkStatus();
  }

  v1::StepRecord MakeRecord(uint64_t step, const StepTotals& totals, SteadyTime start) const {
    v1::StepRecord record;
    record.set_step(step);
    record.set_loss(totals.loss);
    record.set_grad_norm(totals.grad_norm);
    record.set_learning_rate(LearningRate(options_.spec, step));
    record.set_tokens(static_cast<uint64_t>(totals.tokens));
    if (UsesLossScale(options_.spec)) record.set_loss_scale(used_scale_);
    record.set_skipped(totals.overflow);
    record.set_seconds(static_cast<double>(NanosecondsSince(start)) * 1e-9);
    return record;
  }

  // What the gradients of a step make of the state, here or in the stores.
  absl::Status Update(uint64_t step, const StepTotals& totals, SteadyTime start,
                      TrainObserver* observer, PhaseClock* clock) {
    const auto enter = [&](StepPhase phase, const char* what) {
      clock->Enter(phase, what);
      observer->OnProgress(step, phase, what);
    };
    if (saves_ != nullptr) {
      clock->Enter(StepPhase::kBarrier, "");
      ZS_RETURN_IF_ERROR(saves_->Advance(observer));
      saves_->WaitForCopy(step, observer);
    }
    const v1::StepDecision decision =
        MakeDecision(options_.spec, step, totals.grad_norm, static_cast<uint64_t>(totals.tokens),
                     loss_scale_, totals.overflow);
    used_scale_ = std::exchange(loss_scale_, decision.loss_scale()).scale();
    if (options_.store != nullptr) {
      enter(StepPhase::kOffload, "commit");
      // Every rank was in the exchange, so everything is staged. The others need no word of the
      // commit: what they pull is there once it is made.
      const auto rank = static_cast<uint32_t>(job_->rank());
      CrashPoint("worker.before_commit", step, rank);
      if (IsRankZero()) {
        ZS_RETURN_IF_ERROR(observer->BeforeCommit());
        ZS_RETURN_IF_ERROR(Commit(MakeRecord(step, totals, start), decision));
      }
      CrashPoint("worker.before_pull", step, rank);
      ZS_RETURN_IF_ERROR(engine_->PullUpdated());
    } else {
      enter(StepPhase::kOptimizer, "");
      if (!decision.skip())
        ZS_RETURN_IF_ERROR(engine_->Update(MakeAdamWArgs(options_.spec, decision)));
    }
    enter(StepPhase::kBarrier, "");
    return absl::OkStatus();
  }

  // `expected`: what every rank computed, without the words of the coordinator.
  absl::Status Commit(const v1::StepRecord& record, const v1::StepDecision& expected) {
    ZS_ASSIGN_OR_RETURN(
        const v1::StepDecision decision,
        options_.store->Commit(record, NextSample(record.step()),
                               static_cast<uint64_t>(options_.data->sample_count())));
    const uint64_t epoch = options_.store->base().epoch();
    if (decision.step() != record.step() || decision.epoch() != epoch) {
      return absl::InternalError(absl::StrFormat(
          "asked to commit step %d of epoch %d, the coordinator answered with step %d of epoch %d",
          record.step(), epoch, decision.step(), decision.epoch()));
    }
    if (!UsesLossScale(options_.spec) ||
        (decision.skip() == expected.skip() &&
         decision.loss_scale().scale() == expected.loss_scale().scale())) {
      return absl::OkStatus();
    }
    // The other ranks go on with what they computed.
    return absl::InternalError(absl::StrFormat(
        "step %d of epoch %d: the coordinator %s it and goes on with a loss scale of %g; the ranks "
        "%s it and go on with %g. Coordinator and workers must be of one version",
        record.step(), epoch, decision.skip() ? "skips" : "applies", decision.loss_scale().scale(),
        expected.skip() ? "skip" : "apply", expected.loss_scale().scale()));
  }

  absl::StatusOr<double> Evaluate(uint64_t step, TrainObserver* observer,
                                  const std::atomic<bool>& stop, PhaseClock* clock) {
    return evaluator_->Run(
        step,
        [&](StepPhase phase, const std::string& unit) {
          clock->Enter(phase, unit);
          observer->OnProgress(step, phase, unit);
        },
        stop);
  }

  // The generation before ended between its last step and the evaluation that was due.
  absl::Status EvaluateBase(TrainObserver* observer, const std::atomic<bool>& stop,
                            PhaseClock* clock) {
    v1::StepRecord record;
    record.set_step(options_.first_step - 1);
    ZS_ASSIGN_OR_RETURN(const double loss, Evaluate(record.step(), observer, stop, clock));
    record.set_eval_loss(loss);
    observer->OnStep(record);
    return absl::OkStatus();
  }

  absl::Status WriteSamples(uint64_t step, TrainObserver* observer, const std::atomic<bool>& stop,
                            PhaseClock* clock) {
    const auto progress = [&](StepPhase phase, const std::string& unit) {
      clock->Enter(phase, unit);
      observer->OnProgress(step, phase, unit);
    };
    return samples_->Run(step, progress, stop, [&](const v1::SampleRecord& record) {
      if (IsRankZero()) observer->OnSample(record);
    });
  }

  // What this rank says about waiting and saving.
  RankFlags OwnFlags(TrainObserver* observer) {
    RankFlags flags = saves_ != nullptr ? saves_->Flags() : RankFlags();
    flags.hold = IsRankZero() && observer->ShouldHold() ? 1 : 0;
    if (options_.store == nullptr) flags.save_request = static_cast<uint8_t>(observer->WantsSave());
    return flags;
  }

  // The strongest request of the latest exchange.
  SaveRequest Requested() const {
    uint8_t most = 0;
    for (const RankFlags& flags : exchange_->flags()) most = std::max(most, flags.save_request);
    return static_cast<SaveRequest>(std::min(most, uint8_t{2}));
  }

  absl::Status SaveIfDue(uint64_t step, SaveRequest request, TrainObserver* observer,
                         const std::atomic<bool>& stop) {
    if (options_.store != nullptr) return absl::OkStatus();
    if (saves_ == nullptr) {
      if (request == SaveRequest::kNone) return absl::OkStatus();
      return absl::FailedPreconditionError(
          "asked to save a checkpoint, but the job has no checkpoint section");
    }
    const bool due = IsDue(options_.spec.checkpoint().interval_steps(), step);
    if (saves_->Saved(step) || (!due && request == SaveRequest::kNone)) return absl::OkStatus();
    return saves_->Save(step, Next(step), observer, stop).status();
  }

  absl::Status FinishSave(uint64_t step, TrainObserver* observer, const std::atomic<bool>& stop) {
    return saves_->Finish(step, Next(step), observer, stop);
  }

  // A save and stop was asked for.
  absl::Status Leave(uint64_t step, TrainObserver* observer, const std::atomic<bool>& stop) {
    ZS_RETURN_IF_ERROR(FinishSave(step, observer, stop));
    return absl::CancelledError(absl::StrCat("saved step ", step));
  }

  // All ranks wait together until rank 0 may go on, or someone wants to save and stop.
  absl::StatusOr<SaveRequest> Hold(uint64_t step, TrainObserver* observer,
                                   const std::atomic<bool>& stop) {
    // Rank 0 lets the others wait for a quarter of a collective's deadline, and at most a second.
    constexpr std::chrono::milliseconds kHoldPoll(20);
    const int polls = static_cast<int>(std::min<uint32_t>(
        50, 250 * std::max<uint32_t>(1, options_.spec.timeouts().collective_seconds()) / 20));
    SaveRequest request = SaveRequest::kNone;
    do {
      for (int i = 0; i < polls && !stop; ++i) {
        observer->OnProgress(step, StepPhase::kBarrier, "waiting for the coordinator");
        if (IsRankZero() && !observer->ShouldHold()) break;
        if (!IsRankZero()) break;
        std::this_thread::sleep_for(kHoldPoll);
      }
      if (stop) return Stopped();
      ZS_RETURN_IF_ERROR(exchange_->ExchangeFlags(step, OwnFlags(observer)));
      if (saves_ != nullptr) ZS_RETURN_IF_ERROR(saves_->Advance(observer));
      request = std::max(request, Requested());
    } while (exchange_->flags()[0].hold != 0 && request != SaveRequest::kSaveAndStop);
    return request;
  }

  TrainerOptions options_;
  Communicator* const job_;           // of all ranks
  ModelTable whole_;                  // the model, of which
  std::optional<PipelineRank> mesh_;  // a rank of a mesh has a part
  std::optional<TensorGroup> group_;  // whose parameters are split
  Model model_;                       // what it has
  ZeroPolicy policy_;
  SampleOrder order_;
  StepMeter meter_;
  BubbleShares bubble_;
  int64_t position_ = 0;      // of the first sample of first_step
  v1::LossScale loss_scale_;  // of the step being trained, from its update on of the next
  double used_scale_ = 0;     // of the step last updated
  uint64_t step_ = 0;         // the one being trained
  std::vector<std::string> unit_names_;
  std::unique_ptr<ZeroEngine> engine_;
  std::unique_ptr<ModelRunner> runner_;  // or
  std::unique_ptr<PipelineRunner> pipeline_runner_;
  std::unique_ptr<StepExchange> exchange_;
  std::vector<std::unique_ptr<BatchBuffers>> buffers_;  // of the micro-batches open at once
  std::unique_ptr<Evaluator> evaluator_;
  std::unique_ptr<SampleWriter> samples_;
  std::unique_ptr<SaveLoop> saves_;
  TrainCounters counters_;
};

}  // namespace

const char* NameOf(StepPhase phase) {
  constexpr const char* kNames[kStepPhases] = {"data",    "forward",   "backward", "communication",
                                               "offload", "optimizer", "barrier"};
  return kNames[static_cast<int>(phase)];
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(const TrainerOptions& options) {
  auto trainer = std::make_unique<TrainerImpl>(options);
  ZS_RETURN_IF_ERROR(trainer->Init());
  return trainer;
}

}  // namespace zeroshard
