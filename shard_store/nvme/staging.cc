#include "shard_store/nvme/staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "shard_store/nvme/wait_group.h"

namespace zeroshard::nvme {
namespace {

void Cover(std::map<uint32_t, uint32_t>* covered, uint32_t begin, uint32_t end) {
  auto at = covered->upper_bound(begin);
  if (at != covered->begin() && std::prev(at)->second >= begin) --at;
  while (at != covered->end() && at->first <= end) {
    begin = std::min(begin, at->first);
    end = std::max(end, at->second);
    at = covered->erase(at);
  }
  covered->emplace(begin, end);
}

bool IsWhole(const std::map<uint32_t, uint32_t>& covered, uint32_t bytes) {
  return covered.size() == 1 && covered.begin()->first == 0 && covered.begin()->second == bytes;
}

}  // namespace

class Staging::Cursor {
 public:
  explicit Cursor(absl::Span<const absl::Span<const char>> parts) : parts_(parts) {}
  void Copy(char* to, uint64_t bytes) {
    while (bytes > 0) {
      const absl::Span<const char> part = parts_.front().subspan(begun_);
      const uint64_t now = std::min<uint64_t>(bytes, part.size());
      if (now > 0) std::memcpy(to, part.data(), now);
      to += now;
      bytes -= now;
      begun_ += now;
      if (begun_ == parts_.front().size()) {
        parts_.remove_prefix(1);
        begun_ = 0;
      }
    }
  }

 private:
  absl::Span<const absl::Span<const char>> parts_;
  size_t begun_ = 0;  // bytes of the first part that are copied
};

Staging::Staging(StagingOptions options) : options_(std::move(options)) {}

Staging::~Staging() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return owned_ == 0; });  // AsyncIo ends every write
}

absl::Status Staging::Stage(uint32_t chunk, uint64_t version, int64_t begin, int64_t count,
                            absl::Span<const absl::Span<const char>> parts) {
  const ChunkLayout::Entry* entry = options_.file->layout().Find(chunk);
  uint64_t given = 0;
  for (const absl::Span<const char>& part : parts) given += part.size();
  const uint64_t each = entry == nullptr ? 0 : entry->element_bytes[kStaging];
  if (each == 0 || begin < 0 || count < 0 || begin > entry->shape.elements ||
      count > entry->shape.elements - begin || given != static_cast<uint64_t>(count) * each) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradients for elements [", begin, ", ", begin + count, ") of chunk ", chunk,
                     " in ", given, " bytes; here ",
                     entry == nullptr ? std::string("there is no such chunk")
                                      : absl::StrCat("it has ", entry->shape.elements,
                                                     " elements of ", each, " bytes (0: frozen)")));
  }
  const Moment until =
      std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(options_.timeout);
  Cursor cursor(parts);
  for (int64_t at = begin; at < begin + count;) {
    const int block = static_cast<int>(at / kBlockElements);
    const int64_t end = std::min(begin + count, (block + 1) * kBlockElements);
    const uint32_t first =
        static_cast<uint32_t>((at - block * kBlockElements) * static_cast<int64_t>(each));
    ZS_RETURN_IF_ERROR(Put({chunk, block}, version, first,
                           static_cast<uint32_t>((end - at) * static_cast<int64_t>(each)), &cursor,
                           until));
    at = end;
  }
  return absl::OkStatus();
}

void Staging::Own(Block* block) {
  block->owned = true;
  ++owned_;
  if (block->use.has_value()) uses_.erase(*block->use);
  block->use.reset();
}

void Staging::Disown(const Key& key, Block* block) {
  block->owned = false;
  --owned_;
  if (block->buffer) block->use = uses_.insert(uses_.end(), key);
  changed_.notify_all();
}

absl::StatusOr<IoBuffer> Staging::TakeBuffer(std::unique_lock<std::mutex>* lock, Moment until) {
  while (true) {
    if (IoBuffer buffer = options_.pool->TryTake()) return buffer;
    if (!uses_.empty()) {
      const Key oldest = uses_.front();
      Block& block = blocks_.find(oldest)->second;
      Own(&block);
      Store(oldest, &block, lock);
      continue;
    }
    if (!error_.ok()) return error_;
    if (!WaitUntil(lock, until)) {
      return absl::DeadlineExceededError(
          absl::StrCat(options_.file->path(), ": no buffer for gradients came free within ",
                       absl::FormatDuration(options_.timeout), " (", options_.pool->size(),
                       " in all); is the disk of --nvme-dir too slow for this job?"));
    }
  }
}

// The block is owned, by the write from here on. Lets go of the lock.
void Staging::Store(const Key& key, Block* block, std::unique_lock<std::mutex>* lock) {
  IoBuffer buffer = std::move(block->buffer);
  const uint64_t version = block->version;
  const auto ended = [this, key, block](const absl::Status& status, IoBuffer written) {
    written.Reset();
    std::lock_guard<std::mutex> ending(mutex_);
    block->stored = status.ok();
    if (!status.ok() && error_.ok()) error_ = status;
    Disown(key, block);
  };
  lock->unlock();
  const absl::Status status =
      options_.file->Write({key.first, kStaging, key.second}, version, std::move(buffer), ended);
  if (!status.ok()) ended(status, IoBuffer());
  lock->lock();
}

absl::Status Staging::Put(const Key& key, uint64_t version, uint32_t begin, uint32_t bytes,
                          Cursor* from, Moment until) {
  const uint32_t size = options_.file->layout().Find(key.first)->PayloadBytes(kStaging, key.second);
  const BlockId id = {key.first, kStaging, key.second};
  std::unique_lock<std::mutex> lock(mutex_);
  while (error_.ok()) {
    const auto found = blocks_.find(key);
    if (found == blocks_.end() || !found->second.owned) break;
    if (!WaitUntil(&lock, until)) {
      return absl::DeadlineExceededError(
          absl::StrCat(options_.file->path(), ": chunk ", key.first, " staging block ", key.second,
                       " was not written within ", absl::FormatDuration(options_.timeout)));
    }
  }
  if (!error_.ok()) return error_;
  Block& block = blocks_[key];  // it stays where it is: Drop waits for its owner
  if (!block.covered.empty() && block.version != version) {
    return absl::FailedPreconditionError(
        absl::StrCat(options_.file->path(), ": gradients of step ", version, " for chunk ",
                     key.first, " while those of step ", block.version, " are staged"));
  }
  Own(&block);
  block.version = version;
  if (!block.buffer) {
    auto buffer = TakeBuffer(&lock, until);
    const bool read_back = block.stored && bytes != size;
    if (buffer.ok() && read_back) {
      lock.unlock();
      WaitGroup group;
      absl::Status status;
      IoBuffer got;
      AsyncIo::Done ended = group.Add();
      status = options_.file->Read(id, version, *std::move(buffer),
                                   [&got, ended](absl::Status read, IoBuffer with) {
                                     got = std::move(with);
                                     ended(std::move(read), IoBuffer());
                                   });
      if (!status.ok()) ended(status, IoBuffer());
      status = group.Wait();
      if (status.ok()) status = options_.file->Check(id, version, got);
      if (status.ok()) {
        buffer = std::move(got);
      } else {
        got.Reset();
        buffer = status;
      }
      lock.lock();
      if (!status.ok() && error_.ok()) error_ = status;
    }
    if (!buffer.ok()) {
      Disown(key, &block);
      return buffer.status();
    }
    block.buffer = *std::move(buffer);
  }
  lock.unlock();
  from->Copy(block.buffer.data() + begin, bytes);
  lock.lock();
  Cover(&block.covered, begin, begin + bytes);
  block.stored = false;
  if (IsWhole(block.covered, size)) {
    Store(key, &block, &lock);
  } else {
    Disown(key, &block);
  }
  return absl::OkStatus();
}

absl::Status Staging::Flush() {
  const Moment until =
      std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(options_.timeout);
  std::unique_lock<std::mutex> lock(mutex_);
  while (owned_ != 0) {
    if (!WaitUntil(&lock, until)) {
      return absl::DeadlineExceededError(absl::StrCat(
          options_.file->path(), ": ", owned_, " blocks of gradients were not written ", "within ",
          absl::FormatDuration(options_.timeout)));
    }
  }
  if (!error_.ok()) return error_;
  for (const auto& [key, block] : blocks_) {
    const uint32_t size =
        options_.file->layout().Find(key.first)->PayloadBytes(kStaging, key.second);
    if (IsWhole(block.covered, size)) continue;
    uint64_t covered = 0;
    for (const auto& [begin, end] : block.covered) covered += end - begin;
    return absl::FailedPreconditionError(
        absl::StrCat(options_.file->path(), ": of chunk ", key.first, " staging block ", key.second,
                     " there are ", covered, " of ", size, " bytes of gradients"));
  }
  return absl::OkStatus();
}

absl::Status Staging::Drop() {
  const Moment until =
      std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(options_.timeout);
  std::unique_lock<std::mutex> lock(mutex_);
  while (owned_ != 0) {
    if (!WaitUntil(&lock, until)) {
      return absl::DeadlineExceededError(absl::StrCat(
          options_.file->path(), ": ", owned_, " blocks of gradients were not written ", "within ",
          absl::FormatDuration(options_.timeout)));
    }
  }
  blocks_.clear();
  uses_.clear();
  error_ = absl::OkStatus();
  options_.file->DropStaging();
  return absl::OkStatus();
}

}  // namespace zeroshard::nvme
