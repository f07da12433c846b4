// Reads and checks everything that a job's data section names.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "worker/data/dataset.h"
#include "worker/data/token_run.h"

namespace zeroshard {

// The run of all tokens of spec.train(); errors as TokenDataset::Open. Document starts are in it
// only where spec.packing().mask_documents().
absl::StatusOr<TokenRun> OpenFiles(const v1::DataSpec& spec, int64_t vocab_size,
                                   const DatasetOptions& options);

// One file of ids at `path`, whose content is `bytes`, appended to `run`. `index`: the content of
// the Megatron index at `index_path`, if there is one.
absl::Status AppendTokenFile(const v1::DataSpec& spec, int64_t vocab_size, const std::string& path,
                             FileBytes bytes, const std::string& index_path,
                             std::optional<FileBytes> index, TokenRun* run);

}  // namespace zeroshard
