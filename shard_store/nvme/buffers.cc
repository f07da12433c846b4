#include "shard_store/nvme/buffers.h"

#include <sys/mman.h>

#include <cerrno>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "shard_store/nvme/direct_file.h"

namespace zeroshard::nvme {

absl::StatusOr<std::shared_ptr<BufferArena>> BufferArena::Create(int count, uint32_t bytes,
                                                                 BufferBudget budget) {
  if (count <= 0 || bytes == 0 || bytes % kAlignment != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("buffers: ", count, " of ", bytes,
                     " bytes; wanted: at least one, of a multiple of ", kAlignment, " bytes"));
  }
  const uint64_t total = uint64_t{bytes} * static_cast<uint64_t>(count);
  if (budget.take) {
    if (absl::Status status = budget.take(total); !status.ok()) return status;
  }
  void* base = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    const int error = errno;
    if (budget.take && budget.give) budget.give(total);
    return absl::ResourceExhaustedError(absl::StrCat(
        "no memory for ", count, " buffers of ", bytes, " bytes (",
        absl::ErrnoToStatus(error, "mmap").message(), "); lower --memory-limit or free memory"));
  }
  madvise(base, total, MADV_HUGEPAGE);  // a hint: without huge pages it works as well
  return std::shared_ptr<BufferArena>(
      new BufferArena(static_cast<char*>(base), count, bytes, std::move(budget)));
}

BufferArena::BufferArena(char* base, int count, uint32_t bytes, BufferBudget budget)
    : base_(base), count_(count), buffer_bytes_(bytes), budget_(std::move(budget)) {
  for (int i = count; i-- > 0;) free_.push_back(i);
}

BufferArena::~BufferArena() {
  munmap(base_, total_bytes());
  if (budget_.take && budget_.give) budget_.give(total_bytes());
}

int BufferArena::free() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(free_.size());
}

absl::StatusOr<std::vector<int>> BufferArena::Reserve(int count) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (count <= 0 || static_cast<size_t>(count) > free_.size()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(count, " buffers of ", buffer_bytes_, " bytes wanted, ", free_.size(), " of ",
                     count_, " are free: jobs on this store's disk use the others"));
  }
  std::vector<int> taken(free_.end() - count, free_.end());
  free_.resize(free_.size() - static_cast<size_t>(count));
  return taken;
}

void BufferArena::Return(const std::vector<int>& buffers) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.insert(free_.end(), buffers.begin(), buffers.end());
}

IoBuffer& IoBuffer::operator=(IoBuffer&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  pool_ = std::move(other.pool_);
  index_ = other.index_;
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

void IoBuffer::Reset() {
  if (pool_ == nullptr) return;
  const std::shared_ptr<BufferPool> pool = std::move(pool_);
  pool_ = nullptr;
  data_ = nullptr;
  size_ = 0;
  pool->Give(index_);
}

absl::StatusOr<std::shared_ptr<BufferPool>> BufferPool::Create(std::shared_ptr<BufferArena> arena,
                                                               int count) {
  absl::StatusOr<std::vector<int>> buffers = arena->Reserve(count);
  if (!buffers.ok()) return buffers.status();
  return std::shared_ptr<BufferPool>(new BufferPool(std::move(arena), *std::move(buffers)));
}

BufferPool::BufferPool(std::shared_ptr<BufferArena> arena, std::vector<int> buffers)
    : arena_(std::move(arena)), buffers_(std::move(buffers)), free_(buffers_) {}

BufferPool::~BufferPool() { arena_->Return(buffers_); }

int BufferPool::free() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(free_.size());
}

IoBuffer BufferPool::Make(int index) {
  IoBuffer buffer;
  buffer.pool_ = shared_from_this();
  buffer.index_ = index;
  buffer.size_ = arena_->buffer_bytes();
  buffer.data_ = arena_->base() + uint64_t{buffer.size_} * static_cast<uint64_t>(index);
  return buffer;
}

IoBuffer BufferPool::TryTake() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) return {};
  const int index = free_.back();
  free_.pop_back();
  return Make(index);
}

absl::StatusOr<IoBuffer> BufferPool::Take(absl::Duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!given_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                       [this] { return !free_.empty(); })) {
    return absl::DeadlineExceededError(
        absl::StrCat("none of ", buffers_.size(), " buffers of ", arena_->buffer_bytes(),
                     " bytes came free within ", absl::FormatDuration(timeout),
                     "; is the disk of --nvme-dir too slow for this job?"));
  }
  const int index = free_.back();
  free_.pop_back();
  return Make(index);
}

void BufferPool::Give(int index) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(index);
  }
  given_.notify_one();
}

}  // namespace zeroshard::nvme
