#include "worker/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/hf/config.h"
#include "common/log.h"
#include "common/plan/planner.h"
#include "common/spec/schedule.h"
#include "common/status_macros.h"
#include "common/status_payloads.h"
#include "worker/train/agreement.h"
#include "worker/train/batch_buffers.h"
#include "worker/train/checkpointer.h"
#include "worker/train/evaluator.h"
#include "worker/train/model_runner.h"
#include "worker/train/restore.h"
#include "worker/train/samples.h"
#include "worker/train/step_stats.h"

namespace zeroshard {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;

uint64_t NanosecondsSince(SteadyTime start) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start)
          .count());
}

// Charges elapsed time to the current phase; waiting for communication apart.
class PhaseClock {
 public:
  PhaseClock(TrainCounters* counters, const ZeroEngine* engine)
      : counters_(*counters), engine_(*engine) {}

  void Enter(StepPhase phase) {
    const uint64_t elapsed = NanosecondsSince(since_);
    const uint64_t waited = engine_.WaitedNanoseconds() - waited_;
    Charge(phase_, elapsed > waited ? elapsed - waited : 0);
    Charge(StepPhase::kCommunication, waited);
    since_ = std::chrono::steady_clock::now();
    waited_ = engine_.WaitedNanoseconds();
    phase_ = phase;
  }

 private:
  void Charge(StepPhase phase, uint64_t nanoseconds) {
    counters_.phase_nanoseconds[static_cast<size_t>(phase)] += nanoseconds;
  }

  TrainCounters& counters_;
  const ZeroEngine& engine_;
  SteadyTime since_ = std::chrono::steady_clock::now();
  uint64_t waited_ = 0;
  StepPhase phase_ = StepPhase::kData;
};

// Whether the checkpoint is one of those in `dir`.
bool IsIn(const std::string& checkpoint, const std::string& dir) {
  if (checkpoint.empty() || dir.empty()) return false;
  std::error_code error;
  return std::filesystem::equivalent(std::filesystem::path(checkpoint) / "..", dir, error) &&
         !error;
}

// How long a rank waits for its own disk before it tells the others that it still does.
constexpr absl::Duration kSlice = absl::Seconds(1);
constexpr std::chrono::milliseconds kPoll(5);

class TrainerImpl : public Trainer {
 public:
  explicit TrainerImpl(const TrainerOptions& options)
      : options_(options), order_(options.data->sample_count(), options.spec.seed()) {
    if (options_.files == nullptr) options_.files = &FileSystem::Real();
  }

  absl::Status Init() {
    const v1::JobSpec& spec = options_.spec;
    if (options_.first_step > spec.steps() + 1) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "the job has %d steps, and the checkpoint to go on from is of step %d; raise steps",
          spec.steps(), options_.first_step - 1));
    }
    ZS_RETURN_IF_ERROR(CheckSaves());
    ZS_ASSIGN_OR_RETURN(ModelTable table, MakeModelTable(spec.model()));
    model_ = MakeModel(std::move(table), spec.activation_checkpointing());
    policy_ = MakeZeroPolicy(model_.table, MakeZeroOptions(spec, options_.comm->size()));
    for (const UnitTable& unit : model_.table.units) unit_names_.push_back(unit.name);
    ZS_ASSIGN_OR_RETURN(const InitialState initial, InitialState::Open(options_, model_.table));
    position_ = initial.position();
    // What `checkpoint.dir` holds already needs no saving.
    if (IsIn(initial.resumed_from(), spec.checkpoint().dir())) saved_step_ = initial.step();
    ZS_RETURN_IF_ERROR(Fill(initial));
    ZS_ASSIGN_OR_RETURN(runner_, ModelRunner::Create(&model_, &policy_, engine_.get(),
                                                     options_.device, options_.ops));
    buffers_ =
        std::make_unique<BatchBuffers>(policy_.options.micro_batch, model_.table.config.sequence);
    exchange_ = std::make_unique<StepExchange>(policy_.options.micro_batches,
                                               policy_.options.micro_batch, options_.comm);
    ZS_RETURN_IF_ERROR(MakeEvaluator());
    ZS_RETURN_IF_ERROR(MakeSampleWriter());
    return MakeCheckpointer(initial.resumed_from());
  }

  absl::Status Run(TrainObserver* observer, const std::atomic<bool>& stop) override {
    absl::Status status = Train(observer, stop);
    // Every rank came to this verdict from the same bytes, and all are here: a checkpoint on its
    // way is of a step that was good, and may be the only one.
    if (IsNonFinite(status)) CompleteSave(observer, stop);
    return status;
  }

  absl::StatusOr<std::string> WeightsDigest() override { return engine_->WeightsDigest(); }
  absl::Status SetTensor(const std::string& name, absl::Span<const float> values) override {
    return engine_->SetTensor(name, values);
  }
  absl::StatusOr<std::vector<float>> GatherTensor(const std::string& name) override {
    return engine_->GatherTensor(name);
  }
  const TrainCounters& counters() const override { return counters_; }

 private:
  bool IsRankZero() const { return options_.comm->rank() == 0; }

  absl::Status Train(TrainObserver* observer, const std::atomic<bool>& stop) {
    PhaseClock clock(&counters_, engine_.get());
    const uint64_t last = options_.spec.steps();
    for (uint64_t step = options_.first_step; step <= last; ++step) {
      step_ = step;
      const SteadyTime start = std::chrono::steady_clock::now();
      ZS_ASSIGN_OR_RETURN(const StepTotals totals, Step(step, observer, stop, &clock));
      SaveRequest request = Requested();
      v1::StepRecord record;
      record.set_step(step);
      record.set_loss(totals.loss);
      record.set_grad_norm(totals.grad_norm);
      record.set_learning_rate(LearningRate(options_.spec, step));
      record.set_tokens(static_cast<uint64_t>(totals.tokens));
      record.set_seconds(static_cast<double>(NanosecondsSince(start)) * 1e-9);
      if (evaluator_ != nullptr && IsDue(options_.spec.eval().interval_steps(), step)) {
        ZS_ASSIGN_OR_RETURN(const double loss, Evaluate(step, observer, stop, &clock));
        record.set_eval_loss(loss);
      }
      observer->OnStep(record);
      if (totals.hold) {
        ZS_ASSIGN_OR_RETURN(const SaveRequest held, Hold(step, observer, stop));
        request = std::max(request, held);
      }
      clock.Enter(StepPhase::kBarrier);
      ZS_RETURN_IF_ERROR(SaveIfDue(step, request, observer, stop));
      if (request == SaveRequest::kSaveAndStop && step < last) return Leave(step, observer, stop);
      if (samples_ != nullptr && IsDue(options_.spec.sample().interval_steps(), step))
        ZS_RETURN_IF_ERROR(WriteSamples(step, observer, stop, &clock));
    }
    // Also of a run that had nothing left to train.
    if (checkpointer_ != nullptr) ZS_RETURN_IF_ERROR(FinishSave(last, observer, stop));
    return engine_->Drain();
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

  absl::Status Fill(const InitialState& initial) {
    return initial.Fill(
        options_, model_.table,
        [this](const ParameterSource* weights, const std::atomic<bool>* stop) {
          return ZeroEngine::Create(&model_.table, &policy_, options_.spec.seed(), options_.device,
                                    options_.ops, options_.comm, stop, weights);
        },
        &engine_);
  }

  absl::Status MakeEvaluator() {
    if (options_.spec.eval().data_size() == 0) return absl::OkStatus();
    if (options_.eval_data == nullptr)
      return absl::InvalidArgumentError("the job has eval.data, but no evaluation set was opened");
    ZS_ASSIGN_OR_RETURN(evaluator_, Evaluator::Create(options_.spec, options_.eval_data,
                                                      engine_.get(), runner_.get(), options_.comm));
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

  absl::Status MakeCheckpointer(const std::string& resumed_from) {
    if (options_.spec.checkpoint().dir().empty()) return absl::OkStatus();
    CheckpointerOptions checkpointer;
    checkpointer.spec = options_.spec;
    checkpointer.job = options_.job;
    checkpointer.run_id = options_.run_id;
    checkpointer.resumed_from = resumed_from;
    checkpointer.samples = static_cast<uint64_t>(options_.data->sample_count());
    if (IsRankZero()) checkpointer.assets = FindAssets(options_);
    checkpointer.model = &model_.table;
    checkpointer.engine = engine_.get();
    checkpointer.device = options_.device;
    checkpointer.comm = options_.comm;
    checkpointer.files = options_.files;
    ZS_ASSIGN_OR_RETURN(checkpointer_, Checkpointer::Create(checkpointer));
    return absl::OkStatus();
  }

  // Position in the run's sample order of the first sample of micro-batch j.
  int64_t Position(uint64_t step, int64_t j) const {
    const ZeroOptions& o = policy_.options;
    return position_ +
           (static_cast<int64_t>(step - options_.first_step) * o.micro_batches + j) * o.micro_batch;
  }

  // Whether something is done after this step that is done every so many and after the last.
  bool IsDue(uint64_t interval, uint64_t step) const {
    return step == options_.spec.steps() || (interval > 0 && step % interval == 0);
  }

  MicroBatch Load(uint64_t step, int64_t j) {
    const int64_t first = Position(step, j);
    MicroBatch mb = buffers_->Load(*options_.data, [&](int64_t i) { return order_.At(first + i); });
    mb.first_sample = first;
    return mb;
  }

  absl::Status Stopped() const { return absl::CancelledError("stopped"); }

  absl::StatusOr<StepTotals> Step(uint64_t step, TrainObserver* observer,
                                  const std::atomic<bool>& stop, PhaseClock* clock) {
    const auto progress = [&](StepPhase phase, const std::string& unit) {
      clock->Enter(phase);
      observer->OnProgress(step, phase, unit);
    };
    std::vector<RoundStats> rounds;
    RankVerdict verdict;
    engine_->BeginStep(step);
    for (int64_t round = 0; round < policy_.rounds; ++round) {
      if (stop) return Stopped();
      progress(StepPhase::kData, "");
      engine_->BeginRound(round);
      const int64_t j = round * options_.comm->size() + options_.comm->rank();
      // In a ragged last round a rank without a micro-batch repeats its calls on the last one's
      // tokens (zeros at first): the others wait for it in the collectives, and nobody uses what it
      // computes.
      const bool active = j < policy_.options.micro_batches;
      MicroBatch mb = buffers_->last();
      if (active) {
        mb = Load(step, j);
        ZS_RETURN_IF_ERROR(options_.data->status());
      }
      mb.seed = options_.spec.seed();
      mb.step = step;
      mb.dropout = true;
      ZS_ASSIGN_OR_RETURN(const MicroBatchResult result, runner_->ForwardBackward(mb, progress));
      if (!active) continue;
      rounds.push_back({.loss = result.loss.loss, .tokens = result.loss.tokens});
      counters_.tokens += static_cast<uint64_t>(result.loss.tokens);
      const bool finite = std::isfinite(result.loss.loss) && result.input_gradient_finite;
      if (!finite && verdict.nonfinite_round == 0) {
        verdict.nonfinite_round = static_cast<uint32_t>(round) + 1;
        verdict.nonfinite_sample = static_cast<uint64_t>(Position(step, j));
      }
    }
    progress(StepPhase::kCommunication, "");
    std::string nonfinite_unit;
    ZS_ASSIGN_OR_RETURN(verdict.norm, engine_->FinishGradients(&nonfinite_unit));
    for (size_t u = 0; u < unit_names_.size(); ++u) {
      if (unit_names_[u] == nonfinite_unit) verdict.nonfinite_unit = static_cast<uint32_t>(u) + 1;
    }
    verdict.flags = OwnFlags(observer);
    absl::StatusOr<StepTotals> totals =
        exchange_->Exchange(step, Position(step, 0), verdict, rounds, unit_names_);
    if (!totals.ok()) return totals;
    ZS_RETURN_IF_ERROR(AdvanceSave(observer));
    if (checkpointer_ != nullptr) {
      progress(StepPhase::kBarrier, "copying the state to be saved");
      checkpointer_->WaitForCopy();
    }
    progress(StepPhase::kOptimizer, "");
    // Nothing was said of how to change the weights: no decay either.
    if (totals->tokens > 0) ZS_RETURN_IF_ERROR(engine_->Update(MakeUpdate(step, *totals)));
    progress(StepPhase::kBarrier, "");
    return totals;
  }

  AdamWArgs MakeUpdate(uint64_t step, const StepTotals& totals) const {
    const v1::OptimizerParams& p = options_.spec.optimizer().params();
    AdamWArgs args;
    args.learning_rate = static_cast<float>(LearningRate(options_.spec, step));
    args.beta1 = static_cast<float>(p.betas(0));
    args.beta2 = static_cast<float>(p.betas(1));
    args.eps = static_cast<float>(p.eps());
    args.weight_decay = static_cast<float>(p.weight_decay());
    args.grad_scale =
        static_cast<float>(ClipFactor(totals.grad_norm, options_.spec.gradient_clipping()) /
                           static_cast<double>(totals.tokens));
    args.t = static_cast<int64_t>(step);
    return args;
  }

  absl::StatusOr<double> Evaluate(uint64_t step, TrainObserver* observer,
                                  const std::atomic<bool>& stop, PhaseClock* clock) {
    return evaluator_->Run(
        step,
        [&](StepPhase phase, const std::string& unit) {
          clock->Enter(phase);
          observer->OnProgress(step, phase, unit);
        },
        stop);
  }

  absl::Status WriteSamples(uint64_t step, TrainObserver* observer, const std::atomic<bool>& stop,
                            PhaseClock* clock) {
    const auto progress = [&](StepPhase phase, const std::string& unit) {
      clock->Enter(phase);
      observer->OnProgress(step, phase, unit);
    };
    return samples_->Run(step, progress, stop, [&](const v1::SampleRecord& record) {
      if (IsRankZero()) observer->OnSample(record);
    });
  }

  // What this rank says about waiting and saving.
  RankFlags OwnFlags(TrainObserver* observer) {
    RankFlags flags = SaveFlags();
    flags.hold = IsRankZero() && observer->ShouldHold() ? 1 : 0;
    flags.save_request = static_cast<uint8_t>(observer->WantsSave());
    return flags;
  }

  RankFlags SaveFlags() {
    RankFlags flags;
    if (checkpointer_ == nullptr) return flags;
    flags.save_state = static_cast<uint8_t>(checkpointer_->state());
    const uint64_t before = std::exchange(told_progress_, checkpointer_->progress());
    flags.save_progress = told_progress_ != before ? 1 : 0;
    return flags;
  }

  // The strongest request of the latest exchange.
  SaveRequest Requested() const {
    uint8_t most = 0;
    for (const RankFlags& flags : exchange_->flags()) most = std::max(most, flags.save_request);
    return static_cast<SaveRequest>(std::min(most, uint8_t{2}));
  }

  // After each exchange of flags.
  absl::Status AdvanceSave(TrainObserver* observer) {
    if (checkpointer_ == nullptr) return absl::OkStatus();
    ZS_RETURN_IF_ERROR(checkpointer_->Advance(exchange_->flags()));
    if (const auto record = checkpointer_->TakeRecord()) observer->OnCheckpoint(*record);
    return absl::OkStatus();
  }

  absl::Duration CollectiveDeadline() const { return zeroshard::CollectiveDeadline(options_.spec); }

  // All ranks wait together until no save is on its way. False: none moved for as long as a
  // collective may take.
  absl::StatusOr<bool> WaitForSave(uint64_t step, TrainObserver* observer,
                                   const std::atomic<bool>& stop) {
    const std::string what =
        absl::StrCat("waiting for the checkpoint of step ", checkpointer_->step());
    const absl::Duration slice = std::min(kSlice, CollectiveDeadline() / 4);
    absl::Time moved = absl::Now();
    // What the observer is told counts as an advance, so a disk that is stuck must not say
    // anything.
    uint64_t told_progress = checkpointer_->progress();
    observer->OnProgress(step, StepPhase::kBarrier, what);
    while (!AllIdle(exchange_->flags())) {
      const absl::Time told = absl::Now();
      do {
        if (const uint64_t now = checkpointer_->progress(); now != told_progress) {
          told_progress = now;
          observer->OnProgress(step, StepPhase::kBarrier, what);
        }
        if (stop) return Stopped();
        if (!checkpointer_->Busy() || absl::Now() - told > slice) break;
        std::this_thread::sleep_for(kPoll);
      } while (true);
      RankFlags own = SaveFlags();
      // Rank 0's clock decides, so that all give up together.
      own.hold = IsRankZero() && absl::Now() - moved > CollectiveDeadline() ? 1 : 0;
      ZS_RETURN_IF_ERROR(exchange_->ExchangeFlags(step, own));
      ZS_RETURN_IF_ERROR(AdvanceSave(observer));
      if (exchange_->flags()[0].hold != 0) return false;
      for (const RankFlags& flags : exchange_->flags())
        if (flags.save_progress != 0) moved = absl::Now();
    }
    return true;
  }

  absl::Status SaveIfDue(uint64_t step, SaveRequest request, TrainObserver* observer,
                         const std::atomic<bool>& stop) {
    if (checkpointer_ == nullptr) {
      if (request == SaveRequest::kNone) return absl::OkStatus();
      return absl::FailedPreconditionError(
          "asked to save a checkpoint, but the job has no checkpoint section");
    }
    const bool due = IsDue(options_.spec.checkpoint().interval_steps(), step);
    if (saved_step_ == step || (!due && request == SaveRequest::kNone)) return absl::OkStatus();
    return Save(step, observer, stop).status();
  }

  // False: it was left out, because the one before got stuck.
  absl::StatusOr<bool> Save(uint64_t step, TrainObserver* observer, const std::atomic<bool>& stop) {
    const absl::Time start = absl::Now();
    absl::Duration waited;
    if (!AllIdle(exchange_->flags())) {
      ZS_ASSIGN_OR_RETURN(const bool idle, WaitForSave(step, observer, stop));
      waited = absl::Now() - start;
      if (!idle) {
        ReportSkipped(step, waited, observer);
        return false;
      }
    }
    observer->OnProgress(step, StepPhase::kBarrier, "saving");
    checkpointer_->Start(step, static_cast<uint64_t>(Position(step + 1, 0)), waited);
    saved_step_ = step;
    return true;
  }

  void ReportSkipped(uint64_t step, absl::Duration waited, TrainObserver* observer) {
    if (!IsRankZero()) return;
    v1::CheckpointRecord record;
    record.set_step(step);
    record.set_path(absl::StrCat(options_.spec.checkpoint().dir(), "/", CheckpointName(step)));
    record.set_pause_seconds(absl::ToDoubleSeconds(waited));
    record.set_message(
        absl::StrFormat("it was left out, because nothing of the one of step %d was written for %s "
                        "(timeouts.collective_seconds). Look at the disk of %s",
                        checkpointer_->step(), absl::FormatDuration(CollectiveDeadline()),
                        options_.spec.checkpoint().dir()));
    LogWarning("the checkpoint of step ", step, ": ", record.message());
    observer->OnCheckpoint(record);
  }

  // Waits until the checkpoint of `step` is complete; its error on all ranks.
  absl::Status FinishSave(uint64_t step, TrainObserver* observer, const std::atomic<bool>& stop) {
    bool begun = true;
    if (saved_step_ != step) {
      ZS_ASSIGN_OR_RETURN(begun, Save(step, observer, stop));
    }
    if (begun && checkpointer_->step() != step) return absl::OkStatus();  // was there already
    absl::Status outcome = absl::DeadlineExceededError(NothingWritten());
    if (begun) {
      // What the latest exchange said is older than the save.
      ZS_RETURN_IF_ERROR(exchange_->ExchangeFlags(step, SaveFlags()));
      ZS_RETURN_IF_ERROR(AdvanceSave(observer));
      ZS_ASSIGN_OR_RETURN(const bool idle, WaitForSave(step, observer, stop));
      if (idle) outcome = IsRankZero() ? checkpointer_->outcome() : absl::OkStatus();
    }
    outcome = Agree(options_.comm, outcome, "checkpoint");
    if (outcome.ok()) return outcome;
    return absl::Status(
        outcome.code(),
        absl::StrCat("step ", step, " was trained, but its checkpoint could not be ",
                     "written: ", outcome.message()));
  }

  // Ends what save is on its way, where training ends with an error that all ranks have.
  void CompleteSave(TrainObserver* observer, const std::atomic<bool>& stop) {
    if (checkpointer_ == nullptr || checkpointer_->step() == 0) return;
    const absl::Status status = [&]() -> absl::Status {
      ZS_RETURN_IF_ERROR(exchange_->ExchangeFlags(step_, SaveFlags()));
      ZS_RETURN_IF_ERROR(AdvanceSave(observer));
      ZS_ASSIGN_OR_RETURN(const bool idle, WaitForSave(step_, observer, stop));
      if (idle) return absl::OkStatus();
      return absl::DeadlineExceededError(NothingWritten());
    }();
    if (!status.ok() && IsRankZero()) {
      LogWarning("the checkpoint of step ", checkpointer_->step(),
                 " that was on its way was not completed: ", status.message());
    }
  }

  std::string NothingWritten() const {
    return absl::StrCat("nothing was written for ", absl::FormatDuration(CollectiveDeadline()),
                        " (timeouts.collective_seconds)");
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
      ZS_RETURN_IF_ERROR(AdvanceSave(observer));
      request = std::max(request, Requested());
    } while (exchange_->flags()[0].hold != 0 && request != SaveRequest::kSaveAndStop);
    return request;
  }

  TrainerOptions options_;
  Model model_;
  ZeroPolicy policy_;
  SampleOrder order_;
  int64_t position_ = 0;     // of the first sample of first_step
  uint64_t saved_step_ = 0;  // the latest that was saved, or begun to be
  uint64_t told_progress_ = 0;
  uint64_t step_ = 0;  // the one being trained
  std::vector<std::string> unit_names_;
  std::unique_ptr<ZeroEngine> engine_;
  std::unique_ptr<ModelRunner> runner_;
  std::unique_ptr<StepExchange> exchange_;
  std::unique_ptr<BatchBuffers> buffers_;
  std::unique_ptr<Evaluator> evaluator_;
  std::unique_ptr<SampleWriter> samples_;
  std::unique_ptr<Checkpointer> checkpointer_;
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
