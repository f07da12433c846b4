// Parameters on their way from the disk to workers: reads that are queued, done by threads of their
// own into a fixed number of buffers, and handed over with them. Within this library.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shard_store/state/buffer.h"
#include "shard_store/state/caught.h"
#include "shard_store/state/job_state.h"

namespace zeroshard::store {

// Thread-safe.
class NvmePulls {
 public:
  // Reads into the buffer; its threads may wait.
  using Read = std::function<absl::Status(char* to)>;
  using Done = std::function<void(absl::StatusOr<PinnedParameters>)>;

  // `buffers` of one section of a chunk each: as many reads and what they have brought are in
  // memory at a time. A buffer comes back when its pin goes, also after this. RESOURCE_EXHAUSTED:
  // the system has no thread more.
  static absl::StatusOr<std::unique_ptr<NvmePulls>> Make(
      std::vector<std::shared_ptr<Buffer>> buffers, absl::Duration patience = absl::Seconds(60),
      const ThreadStarter& start_thread = nullptr);
  ~NvmePulls() { End(); }
  NvmePulls(const NvmePulls&) = delete;
  NvmePulls& operator=(const NvmePulls&) = delete;

  // Never waits. `done` is called once, from a thread of this: CANCELLED where no buffer came back
  // within `patience`, since workers do not read what they asked for; nothing is wrong with the
  // state then.
  void Add(size_t bytes, Read read, Done done);
  // Ends what is queued, and what comes later, with CANCELLED. Not on a thread of this.
  void End();

 private:
  NvmePulls(std::vector<std::shared_ptr<Buffer>> buffers, absl::Duration patience);
  struct Task {
    size_t bytes = 0;
    Read read;
    Done done;
  };
  struct Room {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::shared_ptr<Buffer>> free;
    std::deque<Task> tasks;
    bool ending = false;
  };

  void Main();
  void Serve(Task task);

  const absl::Duration patience_;
  const std::shared_ptr<Room> room_;
  std::vector<std::thread> threads_;
};

}  // namespace zeroshard::store
