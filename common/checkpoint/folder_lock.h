// One job at a time in a folder of checkpoints.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace zeroshard {

// Held until destroyed; the kernel lets go when the process ends, however it ends. The file says
// who holds it: {"job": "licences", "run_id": "...", "host": "node-3", "pid": 4711}.
class CheckpointLock {
 public:
  // FAILED_PRECONDITION names the holder.
  static absl::StatusOr<std::unique_ptr<CheckpointLock>> Take(const std::string& dir,
                                                              const std::string& job,
                                                              const std::string& run_id);
  ~CheckpointLock();
  // FAILED_PRECONDITION: somebody removed the file, so that another job may hold a new one.
  absl::Status StillHeld() const;
  CheckpointLock(const CheckpointLock&) = delete;
  CheckpointLock& operator=(const CheckpointLock&) = delete;

 private:
  CheckpointLock(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  const int fd_;
  const std::string path_;
};

}  // namespace zeroshard
