// The changes a save makes to the disk, one call each, so that tests can stop it between any two.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

// A file being written. Errors name the path and what errno says.
class WritableFile {
 public:
  virtual ~WritableFile() = default;  // closes; an unfinished file stays as it is
  virtual absl::Status Append(const void* data, size_t bytes) = 0;
  virtual absl::Status SyncAndClose() = 0;
};

// Thread-safe.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) = 0;
  virtual absl::Status MakeFolder(const std::string& path) = 0;  // fine where it is there
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status RemoveAll(const std::string& path) = 0;  // fine where it is not there
  virtual absl::Status SyncFolder(const std::string& path) = 0;

  static FileSystem& Real();
};

}  // namespace zeroshard
