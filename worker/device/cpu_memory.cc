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

// Null and the reason in errno where there is none.
void* Reserve(size_t bytes) {
  if (bytes > static_cast<size_t>(std::numeric_limits<int64_t>::max()) - kAlignment) {
    errno = EOVERFLOW;
    return nullptr;
  }
  if (bytes >= kMapFrom) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return data == MAP_FAILED ? nullptr : data;
  }
  const auto rounded = static_cast<size_t>(RoundUp(static_cast<int64_t>(bytes), kAlignment));
  void* data = std::aligned_alloc(kAlignment, rounded);
  if (data != nullptr) std::memset(data, 0, rounded);
  return data;
}

void Release(void* data, size_t bytes) {
  if (bytes >= kMapFrom) {
    munmap(data, bytes);
  } else {
    std::free(data);
  }
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
  void* data = Reserve(bytes);
  if (data == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "host memory: no ", bytes, " bytes for ", NameOf(kind), " (", strerror(errno),
        "); in use on this device: ", accounting->Bytes(kind), " bytes of ", NameOf(kind), ", ",
        accounting->TotalBytes(),
        " bytes in all. Use more workers, a higher ZeRO stage or a smaller micro-batch"));
  }
  const auto counted = static_cast<int64_t>(bytes);
  accounting->Add(kind, counted);
  return Buffer(data, bytes, [data, bytes, counted, kind, accounting] {
    Release(data, bytes);
    accounting->Remove(kind, counted);
  });
}

absl::StatusOr<Buffer> AllocateUncounted(size_t bytes) {
  if (bytes == 0) return Buffer();
  void* data = Reserve(bytes);
  if (data == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("host memory: no ", bytes, " bytes for transfers (", strerror(errno),
                     "). Use smaller buffers or buckets, or fewer workers on this host"));
  }
  return Buffer(data, bytes, [data, bytes] { Release(data, bytes); });
}

}  // namespace zeroshard::cpu
