#include "shard_store/state/memory_budget.h"

#include "absl/strings/str_format.h"

namespace zeroshard::store {

absl::Status MemoryBudget::Take(uint64_t bytes, const std::string& what) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > limit_ - used_) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%s takes %d bytes of the store's %s; %d of the %d that %s allows are "
                        "free; raise the limit, add stores, or end other jobs",
                        what, bytes, what_, limit_ - used_, limit_, option_));
  }
  used_ += bytes;
  return absl::OkStatus();
}

void MemoryBudget::Give(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  used_ -= bytes;
}

uint64_t MemoryBudget::used() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

}  // namespace zeroshard::store
