#include "worker/device/cpu_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/types.h"

namespace zeroshard::cpu {
namespace {

constexpr size_t kAlignment = 64;

absl::Status Exhausted(size_t bytes, MemoryKind kind, const AtomicAccounting& accounting,
                       const char* why) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "host memory: no ", bytes, " bytes for ", NameOf(kind), " (", why,
      "); in use on this device: ", accounting.Bytes(kind), " bytes of ", NameOf(kind), ", ",
      accounting.TotalBytes(),
      " bytes in all. Use more workers, a higher ZeRO stage or a smaller micro-batch"));
}

}  // namespace

int64_t AtomicAccounting::Bytes(MemoryKind kind) const {
  return bytes_[static_cast<size_t>(kind)].load(std::memory_order_relaxed);
}

int64_t AtomicAccounting::PeakBytes(MemoryKind kind) const {
  return peak_[static_cast<size_t>(kind)].load(std::memory_order_relaxed);
}

int64_t AtomicAccounting::TotalBytes() const {
  int64_t total = 0;
  for (const auto& bytes : bytes_) total += bytes.load(std::memory_order_relaxed);
  return total;
}

void AtomicAccounting::Add(MemoryKind kind, int64_t bytes) {
  const auto index = static_cast<size_t>(kind);
  const int64_t now = bytes_[index].fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t peak = peak_[index].load(std::memory_order_relaxed);
  while (now > peak && !peak_[index].compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

void AtomicAccounting::Remove(MemoryKind kind, int64_t bytes) {
  bytes_[static_cast<size_t>(kind)].fetch_sub(bytes, std::memory_order_relaxed);
}

absl::StatusOr<Buffer> AllocateHost(size_t bytes, MemoryKind kind,
                                    std::shared_ptr<AtomicAccounting> accounting) {
  if (bytes == 0) return Buffer();
  if (bytes > static_cast<size_t>(std::numeric_limits<int64_t>::max()) - kAlignment) {
    return Exhausted(bytes, kind, *accounting, "more than an address space holds");
  }
  void* data = nullptr;
  const bool mapped = bytes >= kMapFrom;
  if (mapped) {
    data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return Exhausted(bytes, kind, *accounting, strerror(errno));
  } else {
    const auto rounded = static_cast<size_t>(RoundUp(static_cast<int64_t>(bytes), kAlignment));
    data = std::aligned_alloc(kAlignment, rounded);
    if (data == nullptr) return Exhausted(bytes, kind, *accounting, strerror(errno));
    std::memset(data, 0, rounded);
  }
  const auto counted = static_cast<int64_t>(bytes);
  accounting->Add(kind, counted);
  return Buffer(data, bytes, [data, bytes, counted, kind, mapped, accounting] {
    if (mapped) {
      munmap(data, bytes);
    } else {
      std::free(data);
    }
    accounting->Remove(kind, counted);
  });
}

}  // namespace zeroshard::cpu
