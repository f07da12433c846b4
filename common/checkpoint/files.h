// The files of a checkpoint as files: their checksums, and those carried along from elsewhere.
// Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/file_system.h"
#include "common/checkpoint/manifest.h"

namespace zeroshard {

// Size and checksum of a file that is there: <folder>/<name>. Holds 1 MiB of it at a time.
// `on_bytes`, where there is one, is told of every part read. NOT_FOUND and others as the system
// says, with the path.
absl::StatusOr<CheckpointFile> DescribeFile(
    const std::string& folder, const std::string& name,
    const std::function<void(uint64_t bytes)>& on_bytes = nullptr);

// Copies small files (config.json, the tokenizer's; at most 256 MiB each) into <folder>/assets
// under their own names, synced, and appends them to `files`. Nothing is made where `paths` is
// empty. INVALID_ARGUMENT: two have one name.
absl::Status CopyAssets(FileSystem* file_system, const std::vector<std::string>& paths,
                        const std::string& folder, std::vector<CheckpointFile>* files);

}  // namespace zeroshard
