// Writes a Hugging Face folder that transformers, vLLM and llama.cpp read.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/parameter_source.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

struct HfExportOptions {
  DType dtype = DType::kBF16;                // kF32, kBF16 or kF16
  uint64_t max_shard_bytes = 5'000'000'000;  // above it: several files and an index
  std::string assets;  // a folder whose files are carried along (config.json, tokenizer files,
                       // generation_config.json); empty: none
  // The token that ends a text, for a model that came without a config.json: eos_token_id there and
  // in a generation_config.json. Models trained from their first step end their texts with
  // data.packing.separator, or what their tokenizer ends texts with.
  std::optional<int32_t> end_of_text;
  std::function<void(uint64_t done, uint64_t total)> progress;  // bytes; may be empty
  // Asked every few MiB; may be empty. True gives up: ABORTED, and nothing is left.
  std::function<bool()> stopped;
};

// Tensor by tensor; of one matrix of a block all fp32 values are in memory at once, of everything
// else a few MiB. Written to a temporary folder beside `folder`, synced and renamed, so that there
// is a whole model or nothing. config.json is the assets' own with torch_dtype changed and nothing
// else, or FormatHfConfig's, with a generation_config.json where the assets have none. 16 bits
// are rounded to nearest even (what fp16 cannot hold is infinite); a tied head is not written.
// ALREADY_EXISTS: `folder` holds something. INVALID_ARGUMENT: the assets' config.json describes
// another model than this one, CheckExportable, no such token. Else what the source or the file
// system says, with the path.
absl::Status ExportHfFolder(const v1::ModelSpec& model, const ParameterSource& source,
                            const std::string& folder, const HfExportOptions& options);

// Which files of a Hugging Face folder travel with its model: config.json, generation_config.json
// and the tokenizer's. Names that exist in `folder`, sorted.
std::vector<std::string> ListHfAssets(const std::string& folder);

struct HfAsset {
  std::string source;  // the path of the file
  std::string name;    // what it is called where it is carried to
};

// The files of a tokenizer that travel with the model: of a folder, or of the one that a file is
// in, all that are a tokenizer's and there, by name; the file itself as tokenizer.json, whatever it
// is called. None for what is neither (bytes, tokens, a path that is gone).
std::vector<HfAsset> TokenizerAssets(const std::string& tokenizer);
// Whether a file of this name is a tokenizer's: one that must not stay beside another tokenizer.
bool IsTokenizerAsset(absl::string_view name);

}  // namespace zeroshard
