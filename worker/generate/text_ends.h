// How a text of a model begins and ends, and prompts as the model wants them.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/plan/model_table.h"
#include "common/tokenizer/tokenizer.h"
#include "worker/generate/continuation.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

struct TextEnds {
  // What the tokenizer's post-processor puts before every text, as transformers does.
  std::vector<int32_t> prefix;
  std::set<int32_t> end_of_text;  // any of these ends one
};

// `tokenizer` is what Tokenizer::Load makes of `name`. What ends a text: eos_token_id of
// generation_config.json in `folder`, else of config.json there, else the tokenizer's own; and the
// separator of `data`, what the model is trained on, where that is not null. `folder` may be empty
// or lack the files. INVALID_ARGUMENT names the file and the id that is none of `vocab`.
absl::StatusOr<TextEnds> ReadTextEnds(const std::string& name, const Tokenizer& tokenizer,
                                      const std::string& folder, const v1::DataSpec* data,
                                      int64_t vocab);

// The tokens that a tokenizer.json's post-processor (TemplateProcessing, alone or in a Sequence)
// puts before a single text. INVALID_ARGUMENT names `where`.
absl::StatusOr<std::vector<int32_t>> PrefixOf(absl::string_view tokenizer_json,
                                              const Tokenizer& tokenizer, const std::string& where);

// `text` as a prompt of the model, with what ends the answer. INVALID_ARGUMENT, beginning with
// `what`: no token at all, more than the model has positions, or one beyond its vocabulary.
absl::StatusOr<ContinuationOptions> MakePrompt(const std::string& what, absl::string_view text,
                                               const Tokenizer& tokenizer, const TextEnds& ends,
                                               const ModelConfig& model);

}  // namespace zeroshard
