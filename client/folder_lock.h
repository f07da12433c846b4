// One `zeroshard local` at a time in a folder.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace zeroshard {

// Held until destroyed; the kernel lets go when the process ends, however it ends.
class FolderLock {
 public:
  // On FOLDER/local.lock, which holds the owner's process id. FAILED_PRECONDITION names the owner.
  static absl::StatusOr<std::unique_ptr<FolderLock>> Take(const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  explicit FolderLock(int fd) : fd_(fd) {}
  const int fd_;
};

}  // namespace zeroshard
