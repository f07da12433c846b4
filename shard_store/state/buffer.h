// Memory of chunks, counted against the store's budget.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "shard_store/state/memory_budget.h"

namespace zeroshard::store {

// Zeroed memory at an address that is a multiple of 64 bytes; from 2 MiB on, of 2 MiB, in huge
// pages where the system has them. Large ones have no pages until something is written: they come
// from the NUMA node of the thread that does.
class Buffer {
 public:
  // Of bytes that the caller has taken from `budget`, which get them back when the buffer goes (or
  // at once where there is no memory). The budget outlives the buffer. RESOURCE_EXHAUSTED: the
  // system has no memory.
  static absl::StatusOr<std::shared_ptr<Buffer>> Allocate(size_t bytes, MemoryBudget* budget);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* data() const { return data_; }
  size_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

  // Gets pages for all of it, on the calling thread's NUMA node. Its values stay.
  void Touch();

 private:
  Buffer(size_t bytes, MemoryBudget* budget) : bytes_(bytes), budget_(budget) {}

  const size_t bytes_;
  MemoryBudget* const budget_;
  char* data_ = nullptr;
  size_t mapped_ = 0;  // bytes that mmap gave; 0: from the heap
};

}  // namespace zeroshard::store
