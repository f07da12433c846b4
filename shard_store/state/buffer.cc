#include "shard_store/state/buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace zeroshard::store {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMapFrom = size_t{128} << 10;  // smaller ones come from the heap

size_t RoundUpTo(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

// `bytes` (whole pages) at a multiple of a huge page where that is worth it.
char* Map(size_t bytes) {
  const size_t slack = bytes >= kHugePage ? kHugePage : 0;
  void* raw = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(raw);
  if (slack == 0) return begin;
  char* aligned = reinterpret_cast<char*>(RoundUpTo(reinterpret_cast<uintptr_t>(raw), kHugePage));
  const size_t before = static_cast<size_t>(aligned - begin);
  if (before > 0) munmap(begin, before);
  if (before < slack) munmap(aligned + bytes, slack - before);
  (void)madvise(aligned, bytes, MADV_HUGEPAGE);  // only speed depends on it
  return aligned;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Buffer>> Buffer::Allocate(size_t bytes, MemoryBudget* budget) {
  std::shared_ptr<Buffer> buffer(new Buffer(bytes, budget));  // gives the bytes back on an error
  if (bytes == 0) return buffer;
  if (bytes >= kMapFrom) {
    buffer->mapped_ = RoundUpTo(bytes, kPage);
    buffer->data_ = Map(buffer->mapped_);
  } else {
    const size_t room = RoundUpTo(bytes, 64);
    buffer->data_ = static_cast<char*>(std::aligned_alloc(64, room));
    if (buffer->data_ != nullptr) std::memset(buffer->data_, 0, room);
  }
  if (buffer->data_ == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this host gives the store no ", bytes,
                     " bytes more, though --memory-limit allows them; lower the limit or free "
                     "memory"));
  }
  return buffer;
}

Buffer::~Buffer() {
  if (data_ != nullptr) {
    if (mapped_ > 0) {
      munmap(data_, mapped_);
    } else {
      std::free(data_);
    }
  }
  budget_->Give(bytes_);
}

void Buffer::Touch() {
  if (mapped_ == 0) return;
  for (size_t at = 0; at < bytes_; at += kPage) {
    volatile char* byte = data_ + at;
    *byte = *byte;
  }
}

}  // namespace zeroshard::store
