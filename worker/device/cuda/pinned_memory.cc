#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/types.h"
#include "worker/device/cuda/memory.h"

namespace zeroshard::cuda {
namespace {

constexpr size_t kPage = 4096;
// No host has more; rounding up stays in range.
constexpr size_t kMostBytes = size_t{1} << 48;

}  // namespace

PinnedMemory::~PinnedMemory() { ReleaseFree(); }

absl::StatusOr<Buffer> PinnedMemory::Allocate(size_t bytes) {
  if (bytes == 0) return Buffer();
  ZS_ASSIGN_OR_RETURN(const Block block, Take(bytes));
  std::memset(block.data, 0, bytes);
  return Buffer(block.data, bytes, [self = shared_from_this(), block] { self->Give(block); });
}

size_t PinnedMemory::lent_bytes() const {
  std::lock_guard lock(mutex_);
  return lent_bytes_;
}

size_t PinnedMemory::free_bytes() const {
  std::lock_guard lock(mutex_);
  return free_bytes_;
}

absl::StatusOr<PinnedMemory::Block> PinnedMemory::Take(size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    const auto found = free_.lower_bound(bytes);
    if (found != free_.end() && (found->first <= kPage || found->first / 2 <= bytes)) {
      const Block block{.data = found->second, .bytes = found->first};
      free_.erase(found);
      free_bytes_ -= block.bytes;
      lent_bytes_ += block.bytes;
      return block;
    }
  }
  absl::StatusOr<Block> block = Pin(bytes);
  if (absl::IsResourceExhausted(block.status())) {
    ReleaseFree();
    block = Pin(bytes);
  }
  if (!block.ok()) return block;
  std::lock_guard lock(mutex_);
  lent_bytes_ += block->bytes;
  return block;
}

absl::StatusOr<PinnedMemory::Block> PinnedMemory::Pin(size_t bytes) {
  ZS_RETURN_IF_ERROR(context_->Enter());
  Runtime* const runtime = context_->runtime();
  Block block{.data = nullptr, .bytes = bytes};
  Error error = Error::kOutOfMemory;
  if (bytes <= kMostBytes) {
    block.bytes = static_cast<size_t>(RoundUp(static_cast<int64_t>(bytes), kPage));
    error = runtime->HostAllocate(&block.data, block.bytes);
  }
  if (error != Error::kOutOfMemory) {
    ZS_RETURN_IF_ERROR(context_->Check(error, "HostAllocate", __FILE__, __LINE__));
    return block;
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      context_->name(), ": no ", bytes, " bytes of pinned host memory; this worker has pinned ",
      lent_bytes(), " in use and ", free_bytes(),
      " kept. Use fewer workers a host, or smaller offload buffers (buffer_count, buffer_size); "
      "see MemAvailable in /proc/meminfo and the container's memory limit"));
}

void PinnedMemory::Give(Block block) {
  std::lock_guard lock(mutex_);
  free_.emplace(block.bytes, block.data);
  free_bytes_ += block.bytes;
  lent_bytes_ -= block.bytes;
}

void PinnedMemory::ReleaseFree() {
  std::multimap<size_t, void*> free;
  {
    std::lock_guard lock(mutex_);
    free = std::exchange(free_, {});
    free_bytes_ = 0;
  }
  if (free.empty() || !context_->Enter().ok()) return;
  for (const auto& [bytes, data] : free) context_->runtime()->HostFree(data);
}

}  // namespace zeroshard::cuda
