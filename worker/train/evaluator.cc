#include "worker/train/evaluator.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "common/status_macros.h"
#include "common/status_payloads.h"

namespace zeroshard {

int64_t EvalMicroBatches(const v1::JobSpec& spec, int64_t samples) {
  const uint64_t micro_batch = spec.train_micro_batch_size_per_gpu();
  const uint64_t all = (static_cast<uint64_t>(samples) + micro_batch - 1) / micro_batch;
  const uint64_t a_batch = spec.train_batch_size() / micro_batch;
  const uint64_t batches = spec.eval().batches();
  if (batches == 0 || batches > all / a_batch) return static_cast<int64_t>(all);
  return static_cast<int64_t>(batches * a_batch);
}

Evaluator::Evaluator(const v1::JobSpec& spec, const TokenDataset* data, ZeroEngine* engine,
                     ModelRunner* runner, Communicator* comm)
    : micro_batch_(static_cast<int64_t>(spec.train_micro_batch_size_per_gpu())),
      micro_batches_(EvalMicroBatches(spec, data->sample_count())),
      rounds_(CeilDiv(micro_batches_, comm->size())),
      sequence_(spec.model().sequence_length()),
      seed_(spec.seed()),
      data_(data),
      engine_(engine),
      runner_(runner),
      comm_(comm) {}

absl::StatusOr<std::unique_ptr<Evaluator>> Evaluator::Create(const v1::JobSpec& spec,
                                                             const TokenDataset* data,
                                                             ZeroEngine* engine,
                                                             ModelRunner* runner, Device* device,
                                                             Communicator* comm) {
  std::unique_ptr<Evaluator> evaluator(new Evaluator(spec, data, engine, runner, comm));
  ZS_ASSIGN_OR_RETURN(evaluator->buffers_,
                      BatchBuffers::Create(evaluator->micro_batch_, evaluator->sequence_, device));
  ZS_RETURN_IF_ERROR(evaluator->CheckTargets());
  return evaluator;
}

absl::Status Evaluator::CheckTargets() {
  for (int64_t j = 0; j < micro_batches_; ++j) {
    ZS_ASSIGN_OR_RETURN(const LoadedBatch batch, LoadBatch(j));
    if (batch.tokens > 0) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "none of the tokens in the first %d samples of eval.data carries a loss; give "
      "other text, or more eval.batches",
      micro_batches_ * micro_batch_));
}

absl::StatusOr<LoadedBatch> Evaluator::LoadBatch(int64_t j) {
  ZS_ASSIGN_OR_RETURN(const LoadedBatch batch, buffers_->Load(*data_, [&](int64_t i) {
    const int64_t sample = j * micro_batch_ + i;
    return sample < data_->sample_count() ? sample : -1;  // the last one may not be full
  }));
  ZS_RETURN_IF_ERROR(data_->status());
  return batch;
}

absl::StatusOr<double> Evaluator::Run(uint64_t step, const ModelRunner::Progress& progress,
                                      const std::atomic<bool>& stop) {
  const int size = comm_->size(), rank = comm_->rank();
  stats_.assign(static_cast<size_t>(rounds_ * size), {});
  for (int64_t round = 0; round < rounds_; ++round) {
    if (stop) return absl::CancelledError("stopped");
    progress(StepPhase::kData, "evaluation");
    engine_->BeginEvaluation(step);
    const int64_t j = round * size + rank;
    // As in training: a rank without a micro-batch in the last round repeats what it has.
    const bool active = j < micro_batches_;
    LoadedBatch batch{.mb = buffers_->last()};
    if (active) {
      ZS_ASSIGN_OR_RETURN(batch, LoadBatch(j));
    }
    MicroBatch& mb = batch.mb;
    mb.seed = seed_;
    mb.step = step;
    mb.first_sample = j * micro_batch_;
    mb.dropout = false;
    const int64_t slot = round % runner_->slots();
    ZS_RETURN_IF_ERROR(runner_->Loss(mb, slot, progress));
    RoundStats* own = &stats_[static_cast<size_t>(rank * rounds_ + round)];
    own->tokens = batch.tokens;
    if (slot + 1 < runner_->slots() && round + 1 < rounds_) continue;
    ZS_ASSIGN_OR_RETURN(const absl::Span<const MicroBatchSums> sums, runner_->Sums(slot + 1));
    for (int64_t i = 0; i <= slot; ++i) own[i - slot].loss = sums[static_cast<size_t>(i)].loss;
  }
  progress(StepPhase::kCommunication, "evaluation");
  return Fold(step);
}

absl::StatusOr<double> Evaluator::Fold(uint64_t step) {
  const CollectiveInfo info{.phase = Phase::kForward, .unit = "evaluation", .step = step};
  ZS_RETURN_IF_ERROR(comm_->AllGatherHost(stats_.data(), rounds_ * kStatsRoundBytes, info));
  double loss = 0;
  int64_t tokens = 0;
  for (int64_t j = 0; j < micro_batches_; ++j) {
    const int64_t rank = j % comm_->size();
    const RoundStats& stats = stats_[static_cast<size_t>(rank * rounds_ + j / comm_->size())];
    if (!std::isfinite(stats.loss)) {
      absl::Status status = absl::InternalError(absl::StrFormat(
          "step %d: non-finite evaluation loss (%g) on rank %d, samples %d to %d of eval.data, "
          "counted from 0; this step was trained and is not saved. Go on from an earlier "
          "checkpoint with a lower learning rate, or train in fp32",
          step, stats.loss, rank, j * micro_batch_, (j + 1) * micro_batch_ - 1));
      SetBlamedRank(static_cast<uint32_t>(rank), &status);
      MarkNonFinite(&status);
      return status;
    }
    loss += stats.loss;
    tokens += stats.tokens;
  }
  return loss / static_cast<double>(tokens);
}

}  // namespace zeroshard
