// All jobs of one store: drives their controls (core/job_control.h) and their chunks (job_state.h).
// Transport-free: what arrives comes in as calls, what is to be sent goes out through a sink.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bulk/frame.h"
#include "common/checkpoint/file_system.h"
#include "shard_store/core/job_control.h"
#include "shard_store/nvme/io_counters.h"
#include "shard_store/state/caught.h"
#include "shard_store/state/job_state.h"
#include "shard_store/state/memory_budget.h"
#include "shard_store/state/task_pool.h"
#include "shard_store/state/too_early.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::store {

// Reads chunks of a job that another store holds. Made by the service, over Bulk streams, without
// waiting for the other store.
class PeerReader {
 public:
  virtual ~PeerReader() = default;
  // fp32 elements [begin, begin + values.size()) of a chunk at `version`, at most kMaxPayload
  // bytes. The implementation gives up after a time of its own; what UNAVAILABLE, ABORTED,
  // FAILED_PRECONDITION and DEADLINE_EXCEEDED say may pass, and is tried again on a new reader
  // until nothing has come for PeerTimeout. One thread at a time.
  virtual absl::Status Read(const v1::StateVersion& version, uint32_t chunk, StateKind kind,
                            int64_t begin, absl::Span<float> values) = 0;
  // From any thread: a Read that waits, and each one after it, soon ends with CANCELLED.
  virtual void Cancel() = 0;
};

struct StoreHostOptions {
  uint64_t memory_limit = 0;
  std::string nvme_dir;  // empty: none
  uint64_t nvme_limit = 0;
  int threads = 1;
  FileSystem* files = nullptr;  // null: the real one
  // Called without locks held, from any thread, with the newest report of a job that has changed;
  // of one job by one thread at a time, in order. Must not wait.
  std::function<void(const v1::StoreReport&)> on_report;
  std::function<absl::StatusOr<std::unique_ptr<PeerReader>>(const v1::StoreMap::Store& peer,
                                                            const v1::BulkHello& hello)>
      connect_peer;
  // Of this process, as the coordinator knows it now; changes when it is fenced. Called without
  // locks held. Null, or an empty answer: unknown, and directives are not compared with it.
  std::function<std::string()> incarnation;
  int64_t chunk_elements = kChunkElements;  // others: tests alone
  ThreadStarter start_thread;               // of a job's own threads; others: tests alone
  nvme::DiskHook* disk_hook = nullptr;      // tests alone
  absl::Duration disk_stall_limit = absl::Seconds(30);  // of a disk; others: tests alone
};

class HostJob;

// Thread-safe. Outlives the parameters that it has pinned.
class StoreHost {
 public:
  explicit StoreHost(StoreHostOptions options);
  // Ends what is under way, and waits for it.
  ~StoreHost();
  // Forgets everything, and waits so long for what is under way: a write into a file system that
  // does not answer cannot be ended, nor can one to a disk before that is given up.
  // DEADLINE_EXCEEDED names the folder, of checkpoints or --nvme-dir; this must not end then, the
  // process may.
  absl::Status Finish(absl::Duration patience);

  // From the coordinator. Never waits: loading, applying and writing have threads of their own.
  void OnDirective(const v1::StoreDirective& directive);
  // Of every job here, for a coordinator that this store has just come back to.
  std::vector<v1::StoreReport> Reports() const;
  // This process was fenced: everything is forgotten, every stream ends; no reports of it.
  void Clear();

  // --- bulk. A stream of a rank, or of a store that copies. ---
  class Stream;  // shared: it stays valid after its generation ended, and answers errors
  // UNAVAILABLE: the generation is not open here yet, or a rank asks for a job that is not here;
  // NOT_FOUND: a store does, which is never told to copy from one that has yet to hear of the job;
  // FAILED_PRECONDITION: it is over, or the one who asks is of another incarnation than that rank,
  // or store, is known by here. `on_end` is called at most once, from any thread, when the store
  // ends the stream.
  absl::StatusOr<std::shared_ptr<Stream>> Open(const v1::BulkHello& hello,
                                               std::function<void(const absl::Status&)> on_end);
  // Checks, stages and counts one kPush frame, whose payload is `parts`; waits for the disk alone,
  // of a job that has its state there. OK: it is staged, or was before. TooEarly: the chunk does
  // not have the version before yet (another replica of it was quicker), or there is no room for
  // the next step's gradients before all of this one is applied, see WaitForPush. UNAVAILABLE
  // otherwise: the state here is of no use any more. Other errors are those of
  // JobControl::CheckPush and ABORTED where the stream was ended.
  absl::Status Push(Stream* stream, const bulk::Header& header,
                    absl::Span<const absl::Span<const char>> parts);
  // After Push said TooEarly: calls `ready` once, from any thread or at once, when that frame can
  // be given to Push again (which then says whatever is so), with OK; with an error when the
  // stream was ended or closed, or the state here is of no use any more (UNAVAILABLE). Until then
  // the peer is best not read on. For a job on the disk that thread is not one of the pool.
  using PushHandler = std::function<void(const absl::Status&)>;
  void WaitForPush(const std::shared_ptr<Stream>& stream, const bulk::Header& header,
                   PushHandler ready);
  // Answers a kPull, now or when the chunk has that version, from any thread, once: parameters, or
  // why not (ABORTED: the generation ended; CANCELLED: the stream was closed). The range may be
  // larger than a frame.
  using PullHandler = std::function<void(absl::StatusOr<PinnedParameters>)>;
  void Pull(const std::shared_ptr<Stream>& stream, const bulk::Header& header, PullHandler handler);
  // Answers a kState of at most kMaxPayload bytes. UNAVAILABLE: the state is not at that version
  // yet; FAILED_PRECONDITION: no more.
  absl::Status State(Stream* stream, const bulk::Header& header, absl::Span<float> values);
  void Close(const std::shared_ptr<Stream>& stream);

  // --- views ---
  v1::StoreUsage usage() const;  // of all jobs
  struct Traffic {
    uint64_t pushed = 0, pulled = 0;  // bytes of payload
    uint64_t copied = 0;              // to other stores
  };
  Traffic traffic() const;
  struct Memory {
    uint64_t used = 0;  // of the limit: state, copies for snapshots, what is still being sent
    uint64_t held = 0;  // of that, the state of jobs: the rest comes free by itself
  };
  Memory memory() const;  // in the host's memory
  Memory disk() const;    // in the NVMe folder
  // Of the memory, what states on the disk are read and written through; none of usage()'s kinds.
  uint64_t buffer_bytes() const;
  size_t jobs() const;
  // Seconds that each update took since the last call; the newest thousand.
  std::vector<double> TakeUpdateSeconds();
  // Likewise that each part of a checkpoint took that was written whole.
  std::vector<double> TakeSnapshotSeconds();
  const nvme::IoCounters& disk_io() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeroshard::store
