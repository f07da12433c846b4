#include "worker/train/evaluator.h"

#include <algorithm>
#include <cmath>
#include <utility>

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

Evaluator::Evaluator(const v1::JobSpec& spec, const TokenDataset* data, LossRunner* runner,
                     const MeshShape& shape, Communicator* job)
    : micro_batch_(static_cast<int64_t>(spec.train_micro_batch_size_per_gpu())),
      micro_batches_(EvalMicroBatches(spec, data->sample_count())),
      rounds_(CeilDiv(micro_batches_, shape.data)),
      sequence_(spec.model().sequence_length()),
      seed_(spec.seed()),
      data_(data),
      runner_(runner),
      shape_(shape),
      job_(job) {}

absl::StatusOr<std::unique_ptr<Evaluator>> Evaluator::Create(const v1::JobSpec& spec,
                                                             const TokenDataset* data,
                                                             LossRunner* runner,
                                                             const MeshShape& shape, Device* device,
                                                             Communicator* job) {
  std::unique_ptr<Evaluator> evaluator(new Evaluator(spec, data, runner, shape, job));
  for (int64_t i = 0; i < runner->OpenLosses(); ++i) {
    ZS_ASSIGN_OR_RETURN(
        std::unique_ptr<BatchBuffers> buffers,
        BatchBuffers::Create(evaluator->micro_batch_, evaluator->sequence_, device));
    evaluator->buffers_.push_back(std::move(buffers));
  }
  ZS_RETURN_IF_ERROR(evaluator->CheckTargets());
  return evaluator;
}

absl::Status Evaluator::CheckTargets() {
  for (int64_t j = 0; j < micro_batches_; ++j) {
    ZS_ASSIGN_OR_RETURN(const LoadedBatch batch, LoadBatch(j, buffers_.front().get()));
    if (batch.tokens > 0) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "none of the tokens in the first %d samples of eval.data carries a loss; give "
      "other text, or more eval.batches",
      micro_batches_ * micro_batch_));
}

absl::StatusOr<LoadedBatch> Evaluator::LoadBatch(int64_t j, BatchBuffers* buffers) {
  ZS_ASSIGN_OR_RETURN(const LoadedBatch batch, buffers->Load(*data_, [&](int64_t i) {
    const int64_t sample = j * micro_batch_ + i;
    return sample < data_->sample_count() ? sample : -1;  // the last one may not be full
  }));
  ZS_RETURN_IF_ERROR(data_->status());
  return batch;
}

absl::StatusOr<MicroBatch> Evaluator::LoadRound(uint64_t step, int64_t round) {
  BatchBuffers& buffers = *buffers_[static_cast<size_t>(round) % buffers_.size()];
  const int64_t j = round * shape_.data + PositionOf(shape_, job_->rank()).data;
  LoadedBatch batch{.mb = buffers.last()};
  // As in training: a rank without a micro-batch in the last round repeats what it has.
  if (j < micro_batches_) {
    ZS_ASSIGN_OR_RETURN(batch, LoadBatch(j, &buffers));
  }
  stats_[static_cast<size_t>(job_->rank() * rounds_ + round)].tokens = batch.tokens;
  batch.mb.seed = seed_;
  batch.mb.step = step;
  batch.mb.first_sample = j * micro_batch_;
  batch.mb.dropout = false;
  return batch.mb;
}

absl::StatusOr<double> Evaluator::Run(uint64_t step, const LossRunner::Progress& progress,
                                      const std::atomic<bool>& stop) {
  stats_.assign(static_cast<size_t>(rounds_ * job_->size()), {});
  RoundStats* const own = &stats_[static_cast<size_t>(job_->rank() * rounds_)];
  const int64_t most = runner_->MostLosses();
  for (int64_t first = 0; first < rounds_; first += most) {
    const int64_t n = std::min(most, rounds_ - first);
    const auto load = [&](int64_t i) { return LoadRound(step, first + i); };
    ZS_ASSIGN_OR_RETURN(const absl::Span<const MicroBatchSums> sums,
                        runner_->Losses(step, n, load, progress, stop));
    for (int64_t i = 0; i < n; ++i) own[first + i].loss = sums[static_cast<size_t>(i)].loss;
  }
  progress(StepPhase::kCommunication, "evaluation");
  return Fold(step);
}

absl::StatusOr<double> Evaluator::Fold(uint64_t step) {
  const CollectiveInfo info{.phase = Phase::kForward, .unit = "evaluation", .step = step};
  ZS_RETURN_IF_ERROR(job_->AllGatherHost(stats_.data(), rounds_ * kStatsRoundBytes, info));
  double loss = 0;
  int64_t tokens = 0;
  for (int64_t j = 0; j < micro_batches_; ++j) {
    const int rank = LossRank(shape_, j);
    const RoundStats& stats = stats_[static_cast<size_t>(rank * rounds_ + j / shape_.data)];
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
