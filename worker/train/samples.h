// Texts that the model continues while it trains. All ranks run the model over the same tokens, so
// that the units of stage 3 are gathered on all; rank 0 tells of the answers, which are what
// `generate` would say of the checkpoint. Not thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/tokenizer/tokenizer.h"
#include "worker/device/device.h"
#include "worker/generate/continuation.h"
#include "worker/generate/text_ends.h"
#include "worker/model/unit.h"
#include "worker/ops/ops.h"
#include "worker/train/model_runner.h"
#include "worker/zero/engine.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard {

class SampleWriter {
 public:
  // All outlive this. `model_folder` holds the configuration files that say what ends a text
  // (ReadTextEnds); may be empty. INVALID_ARGUMENT names the prompt that has ids beyond the model's
  // vocabulary, or more tokens than the model has positions.
  static absl::StatusOr<std::unique_ptr<SampleWriter>> Create(
      const v1::JobSpec& spec, const Tokenizer* tokenizer, const std::string& model_folder,
      const Model* model, ZeroEngine* engine, Device* device, Ops* ops);

  // Collective, between steps; changes nothing that training uses. `each` is called with every
  // prompt's answer, the same on all ranks. The cache and activations exist only meanwhile.
  absl::Status Run(uint64_t step, const ModelRunner::Progress& progress,
                   const std::atomic<bool>& stop,
                   const std::function<void(const v1::SampleRecord&)>& each);

 private:
  SampleWriter(const v1::JobSpec& spec, const Tokenizer* tokenizer, const Model* model,
               ZeroEngine* engine, Device* device, Ops* ops);
  absl::Status AddPrompt(const std::string& text, const TextEnds& ends);

  const v1::SampleSpec spec_;
  const DType dtype_;
  const uint64_t seed_;
  const Tokenizer* const tokenizer_;
  const Model* const model_;
  ZeroEngine* const engine_;
  Device* const device_;
  Ops* const ops_;
  std::vector<ContinuationOptions> prompts_;
};

}  // namespace zeroshard
