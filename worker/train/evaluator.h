// The loss of text that is not trained on. Not thread-safe.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/rank_mesh.h"
#include "worker/comm/communicator.h"
#include "worker/train/batch_buffers.h"
#include "worker/train/loss_runner.h"
#include "worker/train/step_stats.h"

namespace zeroshard {

// How many micro-batches an evaluation has: `batches` of `train_batch_size` samples, or as many as
// all samples need where that is 0 or more than there are; the last one may not be full.
int64_t EvalMicroBatches(const v1::JobSpec& spec, int64_t samples);

class Evaluator {
 public:
  // All pointers outlive this; `job` connects all ranks, which are a mesh of `shape`.
  // INVALID_ARGUMENT: no token of an evaluation carries a loss. DATA_LOSS as TokenDataset::status.
  static absl::StatusOr<std::unique_ptr<Evaluator>> Create(const v1::JobSpec& spec,
                                                           const TokenDataset* data,
                                                           LossRunner* runner,
                                                           const MeshShape& shape, Device* device,
                                                           Communicator* job);

  // Collective: the mean loss over all tokens that count, the same number on every rank and at any
  // world size and stage: micro-batch j (samples [j*mb, (j+1)*mb) of the file order) is data
  // index j mod D's, and losses are added in fp64 in the order of j. No dropout. Between steps;
  // changes nothing that training uses. INTERNAL, marked non-finite, names step, rank and samples;
  // DATA_LOSS as TokenDataset::status.
  absl::StatusOr<double> Run(uint64_t step, const LossRunner::Progress& progress,
                             const std::atomic<bool>& stop);

 private:
  Evaluator(const v1::JobSpec& spec, const TokenDataset* data, LossRunner* runner,
            const MeshShape& shape, Communicator* job);
  // Whether there is anything to measure: usually the first sample tells.
  absl::Status CheckTargets();
  absl::StatusOr<LoadedBatch> LoadBatch(int64_t j, BatchBuffers* buffers);
  // This rank's micro-batch of a round.
  absl::StatusOr<MicroBatch> LoadRound(uint64_t step, int64_t round);
  absl::StatusOr<double> Fold(uint64_t step);

  const int64_t micro_batch_;
  const int64_t micro_batches_;
  const int64_t rounds_;
  const int64_t sequence_;
  const uint64_t seed_;
  const TokenDataset* const data_;
  LossRunner* const runner_;
  const MeshShape shape_;
  Communicator* const job_;
  std::vector<std::unique_ptr<BatchBuffers>> buffers_;  // of the micro-batches open at once
  std::vector<RoundStats> stats_;                       // [rank][round]
};

}  // namespace zeroshard
