// Memory of a CUDA device, and pinned memory of its host.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "absl/status/statusor.h"
#include "worker/device/cpu_memory.h"
#include "worker/device/cuda/context.h"
#include "worker/device/cuda/stream.h"
#include "worker/device/device.h"

namespace zeroshard::cuda {

// From the device's own pool, in the order of the compute stream: a buffer may die as soon as the
// work on it is enqueued there. Work of another stream on it must be done by then, or the compute
// stream must have been told to wait for it. What is freed stays with the pool, so that the driver
// is not asked for memory within a step. Thread-safe. Buffers keep it.
class DeviceMemory : public std::enable_shared_from_this<DeviceMemory> {
 public:
  static absl::StatusOr<std::shared_ptr<DeviceMemory>> Create(std::shared_ptr<Context> context,
                                                              std::shared_ptr<CudaStream> compute);
  // Gives the pool's memory back, once the compute stream has run.
  ~DeviceMemory();

  // 256-byte aligned, and zero for whatever any stream of the device is given from now on.
  // RESOURCE_EXHAUSTED after the pool's free memory was given back and another try failed.
  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind);
  const cpu::AtomicAccounting& accounting() const { return accounting_; }

 private:
  DeviceMemory(std::shared_ptr<Context> context, std::shared_ptr<CudaStream> compute,
               StreamHandle stream, PoolHandle pool);
  absl::StatusOr<void*> Take(size_t bytes, MemoryKind kind);
  absl::Status Zero(void* data, size_t bytes);
  void Free(void* data);
  absl::Status Exhausted(size_t bytes, MemoryKind kind) const;

  const std::shared_ptr<Context> context_;
  const std::shared_ptr<CudaStream> compute_;
  const StreamHandle stream_;  // of compute_
  const PoolHandle pool_;
  cpu::AtomicAccounting accounting_;
};

// Pinned memory, kept when it is freed: pinning costs about a second for some GB and stops the GPU.
// Thread-safe. Buffers keep it.
class PinnedMemory : public std::enable_shared_from_this<PinnedMemory> {
 public:
  explicit PinnedMemory(std::shared_ptr<Context> context) : context_(std::move(context)) {}
  ~PinnedMemory();

  // Zeroed, page-aligned. A free block of up to twice the size, or a new one. RESOURCE_EXHAUSTED
  // after the free blocks were given back and another try failed.
  absl::StatusOr<Buffer> Allocate(size_t bytes);
  size_t lent_bytes() const;
  size_t free_bytes() const;  // kept for reuse

 private:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
  };
  absl::StatusOr<Block> Take(size_t bytes);
  absl::StatusOr<Block> Pin(size_t bytes);
  void Give(Block block);
  void ReleaseFree();

  const std::shared_ptr<Context> context_;
  mutable std::mutex mutex_;
  std::multimap<size_t, void*> free_;  // by size
  size_t lent_bytes_ = 0, free_bytes_ = 0;
};

}  // namespace zeroshard::cuda
