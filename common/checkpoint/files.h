// The files of a checkpoint as files: their checksums, and those carried along from elsewhere.
// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/file_system.h"
#include "common/checkpoint/manifest.h"

namespace zeroshard {

// Size and checksum of a file that is there: <folder>/<name>. Holds 1 MiB of it at a time.
// `on_bytes`, where there is one, is told of every part read. NOT_FOUND and others as the system
// says, with the path; CANCELLED once `stop` (may be null) is true.
absl::StatusOr<CheckpointFile> DescribeFile(
    const std::string& folder, const std::string& name,
    const std::function<void(uint64_t bytes)>& on_bytes = nullptr,
    const std::atomic<bool>* stop = nullptr);

// A small file that travels with a model: config.json, the tokenizer's.
struct Asset {
  std::string name;
  std::string content;
};
constexpr size_t kMaxAssetBytes = size_t{256} << 20;  // of all of a model's

// Reads files, path by the name each shall have. NOT_FOUND and others name the path;
// INVALID_ARGUMENT: together they have more than `limit` bytes.
absl::StatusOr<std::vector<Asset>> ReadAssets(const std::map<std::string, std::string>& paths,
                                              size_t limit = kMaxAssetBytes);

// Writes them into <folder>/assets, synced, and appends them to `files`. Nothing is made where
// there are none. INVALID_ARGUMENT: two have one name, or one is no name of a file.
absl::Status WriteAssets(FileSystem* file_system, const std::vector<Asset>& assets,
                         const std::string& folder, std::vector<CheckpointFile>* files);

}  // namespace zeroshard
