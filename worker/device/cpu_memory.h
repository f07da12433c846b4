// Host memory with the accounting of a device: what MakeCpuDevice allocates from.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/device/device.h"

namespace zeroshard::cpu {

// Bytes in use and their peak, by kind. Thread-safe, lock-free.
class AtomicAccounting : public MemoryAccounting {
 public:
  int64_t Bytes(MemoryKind kind) const override;
  int64_t PeakBytes(MemoryKind kind) const override;
  int64_t TotalBytes() const;
  void Add(MemoryKind kind, int64_t bytes);
  void Remove(MemoryKind kind, int64_t bytes);

 private:
  std::array<std::atomic<int64_t>, kMemoryKinds> bytes_{};
  std::array<std::atomic<int64_t>, kMemoryKinds> peak_{};
};

// Zeroed memory at a multiple of 64 bytes. From kMapFrom bytes on it is a mapping of its own: pages
// take no memory until they are touched, and go back to the system when the buffer dies. Smaller
// ones come from the heap. The buffer keeps `accounting` alive.
// RESOURCE_EXHAUSTED where the system has no memory left.
inline constexpr size_t kMapFrom = size_t{1} << 18;
absl::StatusOr<Buffer> AllocateHost(size_t bytes, MemoryKind kind,
                                    std::shared_ptr<AtomicAccounting> accounting);
// The same memory, counted nowhere.
absl::StatusOr<Buffer> AllocateUncounted(size_t bytes);

}  // namespace zeroshard::cpu
