// Writes a Hugging Face folder that transformers, vLLM and llama.cpp read.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "common/parameter_source.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

struct HfExportOptions {
  DType dtype = DType::kBF16;                // or kF32
  uint64_t max_shard_bytes = 5'000'000'000;  // above it: several files and an index
  std::string assets;  // a folder whose files are carried along (config.json, tokenizer files,
                       // generation_config.json); empty: none
  std::function<void(uint64_t done, uint64_t total)> progress;  // bytes; may be empty
  // Asked every few MiB; may be empty. True gives up: ABORTED, and nothing is left.
  std::function<bool()> stopped;
};

// Tensor by tensor; of one matrix of a block all fp32 values are in memory at once, of everything
// else a few MiB. Written to a temporary folder beside `folder`, synced and renamed, so that there
// is a whole model or nothing. config.json is the assets' own with torch_dtype changed and nothing
// else, or FormatHfConfig's. bf16 is rounded to nearest even; a tied head is not written.
// ALREADY_EXISTS: `folder` holds something. INVALID_ARGUMENT: the assets' config.json describes
// another model than this one. Else what the source or the file system says, with the path.
absl::Status ExportHfFolder(const v1::ModelSpec& model, const ParameterSource& source,
                            const std::string& folder, const HfExportOptions& options);

// Which files of a Hugging Face folder travel with its model: config.json, generation_config.json
// and the tokenizer's. Names that exist in `folder`, sorted.
std::vector<std::string> ListHfAssets(const std::string& folder);

}  // namespace zeroshard
