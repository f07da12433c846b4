// What `generate --model` names: a Hugging Face folder, or a checkpoint (or a folder of them) that
// training wrote.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/reader.h"
#include "common/parameter_source.h"
#include "common/plan/model_table.h"
#include "common/tokenizer/tokenizer.h"

namespace zeroshard {

struct ModelFiles {
  std::string path;  // of the folder that is read
  ModelTable table;
  std::unique_ptr<CheckpointReader> checkpoint;  // where it is one; `weights` borrows it
  std::unique_ptr<ParameterSource> weights;
  std::shared_ptr<const Tokenizer> tokenizer;
  // What the tokenizer's post-processor puts before every text, as transformers does.
  std::vector<int32_t> prefix;
  std::set<int32_t> end_of_text;
  std::vector<std::string> warnings;
};

// `tokenizer`: as Tokenizer::Load names one, or empty: the one that comes with the model. Every
// checksum of a checkpoint is verified. Errors name the file or field and what to do.
absl::StatusOr<ModelFiles> OpenModelFiles(const std::string& path, const std::string& tokenizer);

// The tokens that a tokenizer.json's post-processor (TemplateProcessing, alone or in a Sequence)
// puts before a single text. INVALID_ARGUMENT names `where`.
absl::StatusOr<std::vector<int32_t>> PrefixOf(absl::string_view tokenizer_json,
                                              const Tokenizer& tokenizer, const std::string& where);

}  // namespace zeroshard
