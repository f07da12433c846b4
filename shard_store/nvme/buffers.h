// Memory for what is on its way to or from a file: equal buffers at addresses that O_DIRECT takes,
// in one arena that is made once (and registered with the kernel), handed out by pools of fixed
// size, so that no user can take another's.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace zeroshard::nvme {

// Where an arena's memory is accounted (the store's MemoryBudget). `take` may be null: nowhere.
struct BufferBudget {
  std::function<absl::Status(uint64_t bytes)> take;
  std::function<void(uint64_t bytes)> give;
};

// Thread-safe.
class BufferArena {
 public:
  // `count` buffers of `bytes` each, a multiple of kAlignment. Errors: the budget's;
  // RESOURCE_EXHAUSTED where the system has no such memory; INVALID_ARGUMENT.
  static absl::StatusOr<std::shared_ptr<BufferArena>> Create(int count, uint32_t bytes,
                                                             BufferBudget budget = {});
  ~BufferArena();
  BufferArena(const BufferArena&) = delete;
  BufferArena& operator=(const BufferArena&) = delete;

  char* base() const { return base_; }
  uint64_t total_bytes() const { return uint64_t{buffer_bytes_} * static_cast<uint64_t>(count_); }
  uint32_t buffer_bytes() const { return buffer_bytes_; }
  int count() const { return count_; }
  int free() const;

 private:
  friend class BufferPool;
  BufferArena(char* base, int count, uint32_t bytes, BufferBudget budget);
  absl::StatusOr<std::vector<int>> Reserve(int count);
  void Return(const std::vector<int>& buffers);

  char* const base_;
  const int count_;
  const uint32_t buffer_bytes_;
  const BufferBudget budget_;
  mutable std::mutex mutex_;
  std::vector<int> free_;
};

class BufferPool;

// One buffer, or none. It goes back to its pool with this. Not thread-safe.
class IoBuffer {
 public:
  IoBuffer() = default;
  IoBuffer(IoBuffer&& other) noexcept { *this = std::move(other); }
  IoBuffer& operator=(IoBuffer&& other) noexcept;
  ~IoBuffer() { Reset(); }

  explicit operator bool() const { return pool_ != nullptr; }
  char* data() const { return data_; }
  uint32_t size() const { return size_; }
  void Reset();

 private:
  friend class BufferPool;
  std::shared_ptr<BufferPool> pool_;
  int index_ = 0;
  char* data_ = nullptr;
  uint32_t size_ = 0;
};

// Thread-safe. Buffers that are out keep it alive.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Takes `count` of the arena's buffers for as long as this lives. RESOURCE_EXHAUSTED with the
  // numbers where other pools have them.
  static absl::StatusOr<std::shared_ptr<BufferPool>> Create(std::shared_ptr<BufferArena> arena,
                                                            int count);
  ~BufferPool();

  IoBuffer TryTake();  // empty: all are out
  // DEADLINE_EXCEEDED where none came back in time.
  absl::StatusOr<IoBuffer> Take(absl::Duration timeout);

  int size() const { return static_cast<int>(buffers_.size()); }
  int free() const;

 private:
  friend class IoBuffer;
  BufferPool(std::shared_ptr<BufferArena> arena, std::vector<int> buffers);
  IoBuffer Make(int index);
  void Give(int index);

  const std::shared_ptr<BufferArena> arena_;
  const std::vector<int> buffers_;
  mutable std::mutex mutex_;
  std::condition_variable given_;
  std::vector<int> free_;
};

}  // namespace zeroshard::nvme
