// The chunks of one job on one store: master weights, moments, 16-bit parameters, staged gradients,
// and what is done to them. Knows nothing of generations and terms (core/job_control.h does); the
// caller makes no call that the control has not allowed. Thread-safe where it says so.
//
// A chunk that is not here, or a range outside it, is INVALID_ARGUMENT everywhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/checkpoint/file_system.h"
#include "common/checkpoint/manifest.h"
#include "common/checkpoint/state_digest.h"
#include "common/parameter_source.h"
#include "common/plan/chunk_table.h"
#include "shard_store/state/caught.h"
#include "shard_store/state/memory_budget.h"
#include "shard_store/state/task_pool.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::nvme {
class DiskHook;
struct IoCounters;
}  // namespace zeroshard::nvme

namespace zeroshard::store {

// Parameters of one version. The bytes stay as they are for as long as this lives, whatever is
// applied meanwhile; it may outlive the state, not the memory budget.
struct PinnedParameters {
  std::shared_ptr<const void> pin;
  absl::Span<const char> bytes;
};

// Where a job whose state is on the disk has it.
struct NvmeStateOptions {
  std::string dir;                 // empty: this store has none, and refuses such a job
  MemoryBudget* budget = nullptr;  // of the folder; outlives the state
  std::string run_id, incarnation;
  uint64_t epoch = 0, step = 0;                    // of the version that is filled in first
  int64_t chunk_elements = kChunkElements;         // no chunk has more
  nvme::IoCounters* counters = nullptr;            // outlives the state; null: none
  nvme::DiskHook* hook = nullptr;                  // tests alone, as other limits
  absl::Duration stall_limit = absl::Seconds(30);  // of a disk that does not answer
  ThreadStarter start_thread;                      // others: tests alone
};

struct JobStateOptions {
  v1::JobSpec spec;  // normalised
  const ModelTable* model = nullptr;
  std::map<uint32_t, Chunk> chunks;  // held here
  bool digests = false;              // of each chunk at each step: there are replicas to compare
  MemoryBudget* budget = nullptr;    // these and the model outlive the state
  // Of what writes snapshots, shared by the jobs of a store; null: the budget.
  MemoryBudget* writing = nullptr;
  TaskPool* pool = nullptr;
  NvmeStateOptions nvme;  // of jobs whose state is on the disk
};

class JobState {
 public:
  // Allocates everything, on the calling thread and the pool. RESOURCE_EXHAUSTED: with the bytes
  // wanted, free and allowed.
  static absl::StatusOr<std::unique_ptr<JobState>> Create(const JobStateOptions& options);
  // Waits for what is on its way. Not on a thread of the pool.
  virtual ~JobState() = default;

  // Frees every chunk except `keep`, then allocates those of `chunks` that are not among them.
  // Between other calls, beside Parameters and Stage alone. The errors of Create: then only `keep`
  // is left.
  virtual absl::Status Change(const std::map<uint32_t, Chunk>& chunks,
                              absl::Span<const uint32_t> keep) = 0;

  // Fills newly allocated chunks, about in order, on the calling thread and the pool. Moments may
  // be null: they stay zeros. `on_chunk` is told of each that is there, from any thread. The
  // sources' errors; CANCELLED once `stop` is true.
  struct Sources {
    const ParameterSource* master = nullptr;
    const ParameterSource* exp_avg = nullptr;
    const ParameterSource* exp_avg_sq = nullptr;
  };
  virtual absl::Status Fill(const Sources& sources, absl::Span<const uint32_t> chunks,
                            const std::function<void(uint32_t)>& on_chunk,
                            const std::atomic<bool>* stop) = 0;
  // fp32 values of one kind that another store has; once all kinds of a chunk are whole,
  // FinishChunk makes its parameters. Which kinds a chunk has: HasKind. Thread-safe for disjoint
  // ranges.
  virtual bool HasKind(uint32_t chunk, StateKind kind) const = 0;
  virtual absl::Status SetState(uint32_t chunk, StateKind kind, int64_t begin,
                                absl::Span<const float> values) = 0;
  virtual absl::Status FinishChunk(uint32_t chunk) = 0;
  // Thread-safe beside all but Apply, Fill and SetState.
  virtual absl::Status GetState(uint32_t chunk, StateKind kind, int64_t begin,
                                absl::Span<float> values) const = 0;

  // Copies gradients of the wire type to where they are staged for `step`, which is the one after
  // the version here; while that is applied, the one after it, of chunks that `on_chunk` told of,
  // where StagesWhileApplying. Thread-safe for disjoint ranges, also beside Parameters.
  virtual absl::Status Stage(uint32_t chunk, uint64_t step, int64_t begin, int64_t count,
                             absl::Span<const absl::Span<const char>> parts) = 0;
  // Whether gradients of the next step may be staged before `done` of Apply.
  virtual bool StagesWhileApplying() const { return true; }

  // One step over all trained chunks, on the pool; returns at once. `on_chunk` as chunks get ready,
  // in order of their first use in a forward pass as far as that goes, with the CRC-32C of the
  // master weights (0 without digests); then `done`, once. Both from the pool's threads. After an
  // error (RESOURCE_EXHAUSTED) the state is of no further use.
  virtual void Apply(const v1::StepDecision& decision,
                     std::function<void(uint32_t chunk, uint32_t digest)> on_chunk,
                     std::function<void(const absl::Status&)> done) = 0;

  // Thread-safe. In the compute type. FAILED_PRECONDITION: the chunk is being updated.
  virtual absl::StatusOr<PinnedParameters> Parameters(uint32_t chunk, int64_t begin,
                                                      int64_t count) = 0;

  // The same for one that must not wait: what it gives is called afterwards, once, without locks,
  // and may outlive the state. It answers at once or later, from any thread, with the parameters of
  // version `step`, which is here now; CANCELLED: the state went.
  using ParameterRead = std::function<void(std::function<void(absl::StatusOr<PinnedParameters>)>)>;
  virtual absl::StatusOr<ParameterRead> BeginRead(uint32_t chunk, int64_t begin, int64_t count,
                                                  uint64_t step);

  // Keeps the version that is here now for WriteSnapshot: until it is written, whatever changes a
  // chunk first copies it into memory from a bounded pool, or waits for it to be written. Call it
  // between an Apply and the next, and after EndSnapshot of the one before, whose WriteSnapshot may
  // still be about to return.
  virtual void PreserveSnapshot(const v1::SnapshotOrder& order) = 0;
  // Writes and syncs this store's file; on the calling thread, beside everything else, but once the
  // WriteSnapshot before has returned. `progress` is told of bytes written. The result's `problem`
  // is empty where all went well; then `done`.
  virtual v1::SnapshotReport WriteSnapshot(FileSystem* files,
                                           const std::function<void(uint64_t)>& progress,
                                           const std::atomic<bool>* stop) = 0;
  // Nothing is kept any more, and memory for it is free when this returns; also while WriteSnapshot
  // runs, which fails once the write it is in returns. Thread-safe.
  virtual void EndSnapshot() = 0;

  // Of the fp32 weights of these chunks, as WeightDigest has them. On the pool too; thread-safe
  // beside all but Apply.
  virtual absl::StatusOr<WeightDigest> Digest(absl::Span<const uint32_t> chunks) const = 0;

  // The first error that makes the state useless and was met outside Apply: a damaged or dead disk.
  // Thread-safe.
  virtual absl::Status Health() const { return absl::OkStatus(); }

  // Gives back everything, on the calling thread, though others may hold the object on; after it
  // there are no chunks. Beside all calls but Apply, Fill, Change and Digest. False: some is held
  // until a WriteSnapshot that is under way returns, or the object ends.
  virtual bool Free() { return false; }

  // Thread-safe.
  virtual v1::StoreUsage usage() const = 0;
  // Bytes of memory through which a state on the disk is read and written; they are in no kind of
  // usage(). Thread-safe.
  virtual uint64_t buffer_bytes() const { return 0; }
};

// What Create will take of the budget: the sum of ChunkBytes::Total. While a snapshot is written,
// up to four chunks more are taken where the budget has them; without, updates wait for the disk.
uint64_t BytesOf(const JobStateOptions& options);
// What Create will take of the NVMe folder: 0 of jobs in memory.
uint64_t DiskBytesOf(const JobStateOptions& options);
// An error of a read or write of the state that says that it is of no further use, rather than that
// the caller asked for what is not here.
bool IsOfTheState(const absl::Status& status);

}  // namespace zeroshard::store
