// Where a run's weights and state come from: fresh values, a model folder, a checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/reader.h"
#include "common/hf/weights.h"
#include "worker/train/trainer.h"
#include "worker/zero/engine.h"

namespace zeroshard {

class InitialState {
 public:
  // Collective where something is read, and then the same error on all ranks: INVALID_ARGUMENT,
  // NOT_FOUND or DATA_LOSS name the file and the rank that saw it. Every rank checks the checksums
  // of its share of a checkpoint's files.
  static absl::StatusOr<InitialState> Open(const TrainerOptions& options, const ModelTable& model);

  // Borrowed; null: fresh weights.
  const ParameterSource* weights() const {
    return weights_ != nullptr ? weights_.get() : master_.get();
  }
  // Position in the run's sample order of the first sample.
  int64_t position() const { return position_; }
  // The complete checkpoint this run goes on from; empty where it starts anew.
  const std::string& resumed_from() const { return resumed_from_; }
  // The step of it; 0.
  uint64_t step() const { return step_; }

  // Collective, after the engine was filled with weights(), which `filled` says how it went: loads
  // the moments, and compares the digests of everything loaded with the manifest's. DATA_LOSS.
  absl::Status Load(const absl::Status& filled, const TrainerOptions& options,
                    const ModelTable& model, ZeroEngine* engine) const;

 private:
  absl::Status OpenCheckpoint(const TrainerOptions& options, const ModelTable& model);
  absl::Status ContinueData(const TrainerOptions& options);
  absl::Status CompareDigests(const ModelTable& model, ZeroEngine* engine) const;

  std::unique_ptr<HfWeights> weights_;
  std::unique_ptr<CheckpointReader> reader_;
  std::unique_ptr<ParameterSource> master_;
  std::string resumed_from_;
  uint64_t step_ = 0;
  int64_t position_ = 0;
};

// The files that travel with a model (ListHfAssets), and the tokenizer's: from the checkpoint gone
// on from, else from model.init_from, and from data.tokenizer, whose files come first. Full paths,
// by the names they have in a checkpoint.
std::map<std::string, std::string> FindAssets(const TrainerOptions& options);

}  // namespace zeroshard
