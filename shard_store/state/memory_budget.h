// How much memory the store's jobs may take together (--memory-limit), or of its NVMe folder
// (--nvme-limit). Thread-safe.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "absl/status/status.h"

namespace zeroshard::store {

class MemoryBudget {
 public:
  explicit MemoryBudget(uint64_t limit, const char* what = "memory",
                        const char* option = "--memory-limit")
      : limit_(limit), what_(what), option_(option) {}

  // RESOURCE_EXHAUSTED names `what`, the bytes wanted, those free and the limit.
  absl::Status Take(uint64_t bytes, const std::string& what);
  void Give(uint64_t bytes);

  uint64_t limit() const { return limit_; }
  uint64_t used() const;

 private:
  const uint64_t limit_;
  const char* const what_;
  const char* const option_;
  mutable std::mutex mutex_;
  uint64_t used_ = 0;
};

}  // namespace zeroshard::store
