// Where a run's weights and state come from: fresh values, a model folder, a checkpoint; or the
// shard stores, which have read all that themselves.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/reader.h"
#include "common/hf/weights.h"
#include "worker/train/loading.h"
#include "worker/train/trainer.h"
#include "worker/zero/engine.h"

namespace zeroshard {

class InitialState {
 public:
  // Collective where something is read, and then the same error on all ranks: INVALID_ARGUMENT,
  // NOT_FOUND or DATA_LOSS name the file and the rank that saw it.
  static absl::StatusOr<InitialState> Open(const TrainerOptions& options, const ModelTable& model);

  // Position in the run's sample order of the first sample.
  int64_t position() const { return position_; }
  // The complete checkpoint this run goes on from; empty where it starts anew.
  const std::string& resumed_from() const { return resumed_from_; }
  // The step of it; 0.
  uint64_t step() const { return step_; }
  // Of the first step.
  const v1::LossScale& loss_scale() const { return loss_scale_; }

  // Makes the engine: `make` is called once, with where its weights come from (null: fresh ones; of
  // `model`, which is the full one) and what stops it, on another thread than this where they come
  // from files.
  using MakeEngine = std::function<absl::StatusOr<std::unique_ptr<ZeroEngine>>(
      const ParameterSource* weights, const std::atomic<bool>* stop)>;
  // Collective where something is read: makes the engine and loads the moments. Of a checkpoint
  // each rank meanwhile checks the checksums of its share of the files, so that the disk gives
  // every byte once; nothing is used before all are right, and the digests of everything loaded are
  // the manifest's. `*engine` is null after an error. The errors of LoadTogether, DATA_LOSS, and
  // those of `make`.
  absl::Status Fill(const TrainerOptions& options, const ModelTable& model, const MakeEngine& make,
                    std::unique_ptr<ZeroEngine>* engine) const;

 private:
  absl::Status OpenCheckpoint(const TrainerOptions& options, const ModelTable& model);
  absl::Status ContinueData(const TrainerOptions& options);
  absl::Status ContinueOffloaded(const TrainerOptions& options);
  absl::Status LoadAll(const ModelTable& model, const MakeEngine& make, LoadSignals* signals,
                       std::unique_ptr<ZeroEngine>* engine) const;
  absl::Status CompareDigests(const ModelTable& model, ZeroEngine* engine) const;

  std::unique_ptr<HfWeights> weights_;
  std::unique_ptr<CheckpointReader> reader_;
  std::unique_ptr<ParameterSource> master_;
  std::string resumed_from_;
  uint64_t step_ = 0;
  int64_t position_ = 0;
  v1::LossScale loss_scale_;
};

// As common/saving/completion.h has them, of the run that `options` are of.
std::string FindModelFolder(const TrainerOptions& options);
std::map<std::string, std::string> FindAssets(const TrainerOptions& options);

}  // namespace zeroshard
