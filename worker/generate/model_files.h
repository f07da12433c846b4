// What `generate --model` names: a Hugging Face folder, or a checkpoint (or a folder of them) that
// training wrote.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/reader.h"
#include "common/parameter_source.h"
#include "common/plan/model_table.h"
#include "common/tokenizer/tokenizer.h"
#include "worker/generate/text_ends.h"

namespace zeroshard {

struct ModelFiles {
  std::string path;  // of the folder that is read
  ModelTable table;
  std::unique_ptr<CheckpointReader> checkpoint;  // where it is one; `weights` borrows it
  std::unique_ptr<ParameterSource> weights;
  std::shared_ptr<const Tokenizer> tokenizer;
  TextEnds ends;
  std::vector<std::string> warnings;
};

// `tokenizer`: as Tokenizer::Load names one, or empty: the one that comes with the model. Every
// checksum of a checkpoint is verified. Errors name the file or field and what to do.
absl::StatusOr<ModelFiles> OpenModelFiles(const std::string& path, const std::string& tokenizer);

}  // namespace zeroshard
