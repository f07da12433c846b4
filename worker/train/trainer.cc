#include "worker/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/plan/planner.h"
#include "common/spec/schedule.h"
#include "common/status_macros.h"
#include "worker/train/model_runner.h"
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

class TrainerImpl : public Trainer {
 public:
  explicit TrainerImpl(const TrainerOptions& options)
      : options_(options), order_(options.data->sample_count(), options.spec.seed()) {}

  absl::Status Init() {
    const v1::JobSpec& spec = options_.spec;
    ZS_ASSIGN_OR_RETURN(ModelTable table, MakeModelTable(spec.model()));
    model_ = MakeModel(std::move(table), spec.activation_checkpointing());
    policy_ = MakeZeroPolicy(model_.table, MakeZeroOptions(spec, options_.comm->size()));
    for (const UnitTable& unit : model_.table.units) unit_names_.push_back(unit.name);
    ZS_ASSIGN_OR_RETURN(engine_,
                        ZeroEngine::Create(&model_.table, &policy_, spec.seed(), options_.device,
                                           options_.ops, options_.comm, options_.stop));
    ZS_ASSIGN_OR_RETURN(runner_, ModelRunner::Create(&model_, &policy_, engine_.get(),
                                                     options_.device, options_.ops));
    const size_t tokens =
        static_cast<size_t>(policy_.options.micro_batch * model_.table.config.sequence);
    tokens_.resize(tokens);
    targets_.resize(tokens);
    exchange_ = std::make_unique<StepExchange>(policy_.options.micro_batches,
                                               policy_.options.micro_batch, options_.comm);
    return absl::OkStatus();
  }

  absl::Status Run(TrainObserver* observer, const std::atomic<bool>& stop) override {
    PhaseClock clock(&counters_, engine_.get());
    for (uint64_t step = options_.first_step; step <= options_.spec.steps(); ++step) {
      const SteadyTime start = std::chrono::steady_clock::now();
      ZS_ASSIGN_OR_RETURN(const StepTotals totals, Step(step, observer, stop, &clock));
      v1::StepRecord record;
      record.set_step(step);
      record.set_loss(totals.loss);
      record.set_grad_norm(totals.grad_norm);
      record.set_learning_rate(LearningRate(options_.spec, step));
      record.set_tokens(static_cast<uint64_t>(totals.tokens));
      record.set_seconds(static_cast<double>(NanosecondsSince(start)) * 1e-9);
      observer->OnStep(record);
      if (totals.hold) ZS_RETURN_IF_ERROR(Hold(step, observer, stop));
    }
    return engine_->Drain();
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
  // Position in the run's sample order of the first sample of micro-batch j.
  int64_t Position(uint64_t step, int64_t j) const {
    const ZeroOptions& o = policy_.options;
    return (static_cast<int64_t>(step - 1) * o.micro_batches + j) * o.micro_batch;
  }

  MicroBatch Load(int64_t position) {
    const int64_t mb = policy_.options.micro_batch;
    const size_t sequence = static_cast<size_t>(model_.table.config.sequence);
    for (int64_t i = 0; i < mb; ++i) {
      const size_t at = static_cast<size_t>(i) * sequence;
      options_.data->Sample(order_.At(position + i), absl::MakeSpan(tokens_).subspan(at, sequence),
                            absl::MakeSpan(targets_).subspan(at, sequence));
    }
    return {.batch = mb, .tokens = tokens_.data(), .targets = targets_.data()};
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
      MicroBatch mb{.batch = policy_.options.micro_batch,
                    .tokens = tokens_.data(),
                    .targets = targets_.data()};
      if (active) {
        mb = Load(Position(step, j));
        ZS_RETURN_IF_ERROR(options_.data->status());
      }
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
    verdict.hold = options_.comm->rank() == 0 && observer->ShouldHold() ? 1 : 0;
    absl::StatusOr<StepTotals> totals = exchange_->Exchange(step, verdict, rounds, unit_names_);
    if (!totals.ok()) return totals;
    progress(StepPhase::kOptimizer, "");
    ZS_RETURN_IF_ERROR(engine_->Update(MakeUpdate(step, *totals)));
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

  // All ranks wait together until rank 0 may go on.
  absl::Status Hold(uint64_t step, TrainObserver* observer, const std::atomic<bool>& stop) {
    // Rank 0 lets the others wait for a quarter of a collective's deadline, and at most a second.
    constexpr std::chrono::milliseconds kPoll(20);
    const int polls = static_cast<int>(std::min<uint32_t>(
        50, 250 * std::max<uint32_t>(1, options_.spec.timeouts().collective_seconds()) / 20));
    bool hold = true;
    while (hold) {
      for (int i = 0; i < polls && !stop; ++i) {
        observer->OnProgress(step, StepPhase::kBarrier, "waiting for the coordinator");
        if (options_.comm->rank() == 0 && !observer->ShouldHold()) break;
        if (options_.comm->rank() != 0) break;
        std::this_thread::sleep_for(kPoll);
      }
      if (stop) return Stopped();
      ZS_ASSIGN_OR_RETURN(hold, exchange_->ExchangeHold(step, observer->ShouldHold()));
    }
    return absl::OkStatus();
  }

  const TrainerOptions options_;
  Model model_;
  ZeroPolicy policy_;
  SampleOrder order_;
  std::vector<std::string> unit_names_;
  std::unique_ptr<ZeroEngine> engine_;
  std::unique_ptr<ModelRunner> runner_;
  std::unique_ptr<StepExchange> exchange_;
  std::vector<int32_t> tokens_, targets_;
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
