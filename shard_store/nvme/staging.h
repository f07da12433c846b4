// Gradients on their way to the file: ranges of any alignment come in, whole blocks go out. A block
// that ranges have begun to fill is kept in a buffer; when all of it is there, it is written
// behind. Where every buffer has a begun block in it, the one that was touched longest ago is
// written as it is and read back when more of it comes.
//
// Which ranges may come, and when all are there, is not known here (core/job_control.h): a range is
// overwritten by what comes later, never added to.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "shard_store/nvme/buffers.h"
#include "shard_store/nvme/chunk_file.h"
#include "shard_store/nvme/operation.h"

namespace zeroshard::nvme {

struct StagingOptions {
  std::shared_ptr<ChunkFile> file;
  std::shared_ptr<BufferPool>
      pool;  // nobody else's; at least 1 buffer, better one a stream or more
  absl::Duration timeout = absl::Seconds(60);  // of one Stage, Flush or Drop
};

// Thread-safe. Its calls wait for the disk where it is slower than what comes in; not to be called
// on AsyncIo's threads.
class Staging {
 public:
  explicit Staging(StagingOptions options);
  // Waits for what is being written.
  ~Staging();

  // Elements [begin, begin + count) of a chunk at `version`, the step they are for; `parts` hold
  // their bytes in order. Of one block one version at a time: Drop comes between. INVALID_ARGUMENT:
  // outside the chunk, a frozen chunk, or not as many bytes; DEADLINE_EXCEEDED; else the first
  // error of any write since Drop, with which everything staged is lost.
  absl::Status Stage(uint32_t chunk, uint64_t version, int64_t begin, int64_t count,
                     absl::Span<const absl::Span<const char>> parts);
  // Everything that was staged is in the file. FAILED_PRECONDITION names a block of which a part is
  // missing. The first error of any write.
  absl::Status Flush();
  // Forgets what was staged, also errors. Waits for writes under way; DEADLINE_EXCEEDED.
  absl::Status Drop();

 private:
  using Key = std::pair<uint32_t, int>;  // chunk, block
  struct Block {
    std::map<uint32_t, uint32_t> covered;  // bytes: begin to end, disjoint
    uint64_t version = 0;
    IoBuffer buffer;                              // while it is in memory
    bool owned = false;                           // by one thread, or by the write under way
    bool stored = false;                          // what is covered is in the file
    std::optional<std::list<Key>::iterator> use;  // in uses_
  };

  class Cursor;  // over the bytes of a call
  absl::Status Put(const Key& key, uint64_t version, uint32_t begin, uint32_t bytes, Cursor* from,
                   Moment until);
  // These are called with the lock held.
  absl::StatusOr<IoBuffer> TakeBuffer(std::unique_lock<std::mutex>* lock, Moment until);
  void Own(Block* block);
  void Disown(const Key& key, Block* block);
  void Store(const Key& key, Block* block, std::unique_lock<std::mutex>* lock);
  bool WaitUntil(std::unique_lock<std::mutex>* lock, Moment until) {
    return changed_.wait_until(*lock, until) != std::cv_status::timeout;
  }

  const StagingOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, Block> blocks_;
  std::list<Key> uses_;  // blocks in memory that nobody owns, longest ago first
  int owned_ = 0;        // blocks that a thread or the disk has
  absl::Status error_;
};

}  // namespace zeroshard::nvme
