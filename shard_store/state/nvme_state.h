// JobState on the store's disk (shard_store/nvme): everything of a job lies in one file of the
// folder, in memory are buffers alone, of a number that does not depend on the job
// (common/plan/nvme_bytes.h), all of them taken when the state is made. Within this library.
//
// Parameters lie on the disk too, whichever of the job's devices is nvme: a copy of them in memory
// would be a third of an fp32 job's state.
//
// A change of chunks makes a new file, into which those that stay are copied; until then both are
// there, and both count against the folder's limit.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shard_store/nvme/chunk_file.h"
#include "shard_store/nvme/staging.h"
#include "shard_store/state/job_state.h"
#include "shard_store/state/memory_chunk.h"
#include "shard_store/state/nvme_pulls.h"
#include "shard_store/state/optimizer.h"

namespace zeroshard::store {

class NvmeState : public JobState {
 public:
  // Without chunks: Change gives it those. FAILED_PRECONDITION: there is no folder;
  // RESOURCE_EXHAUSTED: no memory for the buffers.
  static absl::StatusOr<std::unique_ptr<NvmeState>> Make(const JobStateOptions& options);
  ~NvmeState() override;

  absl::Status Change(const std::map<uint32_t, Chunk>& chunks,
                      absl::Span<const uint32_t> keep) override;
  absl::Status Fill(const Sources& sources, absl::Span<const uint32_t> chunks,
                    const std::function<void(uint32_t)>& on_chunk,
                    const std::atomic<bool>* stop) override;
  bool HasKind(uint32_t chunk, StateKind kind) const override;
  absl::Status SetState(uint32_t chunk, StateKind kind, int64_t begin,
                        absl::Span<const float> values) override;
  absl::Status FinishChunk(uint32_t chunk) override;
  absl::Status GetState(uint32_t chunk, StateKind kind, int64_t begin,
                        absl::Span<float> values) const override;
  // Waits for the disk where it is slower than what comes in.
  absl::Status Stage(uint32_t chunk, uint64_t step, int64_t begin, int64_t count,
                     absl::Span<const absl::Span<const char>> parts) override;
  // The gradients of a step lie where those of the step before are until all of it is applied.
  bool StagesWhileApplying() const override { return false; }
  // Waits for gradients that are still on their way to the disk.
  void Apply(const v1::StepDecision& decision,
             std::function<void(uint32_t chunk, uint32_t digest)> on_chunk,
             std::function<void(const absl::Status&)> done) override;
  // Waits for the disk.
  absl::StatusOr<PinnedParameters> Parameters(uint32_t chunk, int64_t begin,
                                              int64_t count) override;
  absl::StatusOr<ParameterRead> BeginRead(uint32_t chunk, int64_t begin, int64_t count,
                                          uint64_t step) override;
  void PreserveSnapshot(const v1::SnapshotOrder& order) override;
  v1::SnapshotReport WriteSnapshot(FileSystem* files, const std::function<void(uint64_t)>& progress,
                                   const std::atomic<bool>* stop) override;
  void EndSnapshot() override;
  absl::StatusOr<WeightDigest> Digest(absl::Span<const uint32_t> chunks) const override;
  v1::StoreUsage usage() const override;
  uint64_t buffer_bytes() const override { return buffer_bytes_; }
  absl::Status Health() const override;
  bool Free() override;

 private:
  // One chunk; its MemoryChunk has no buffers.
  struct Described {
    std::shared_ptr<const MemoryChunk> about;
    ChunkBytes bytes;
    int64_t size() const { return about->size(); }
    bool trained() const { return about->chunk.trained; }
    bool Rounded() const { return bytes.master == 0; }
    uint64_t BytesOf(StateKind kind) const;
    bool Has(StateKind kind) const {
      return BytesOf(kind) != 0 || (kind == StateKind::kMaster && Rounded());
    }
  };
  using Chunks = std::map<uint32_t, Described>;
  // A file and what it took of the folder's limit.
  struct Disk;
  struct Update;
  struct Snapshot;
  class SnapshotWriter;
  struct View {  // a chunk, where it lies and its version
    Described chunk;
    std::shared_ptr<Disk> disk;
    uint64_t version = 0;
  };

  explicit NvmeState(const JobStateOptions& options);
  MemoryBudget* writing() const {
    return options_.writing != nullptr ? options_.writing : options_.budget;
  }
  void GiveBack();  // everything; nobody uses it
  absl::StatusOr<std::shared_ptr<Buffer>> MakeSection();
  absl::StatusOr<std::shared_ptr<Disk>> MakeDisk(const Chunks& chunks);
  absl::Status CopyChunk(const Described& chunk, const Disk& from, const Disk& to);
  absl::StatusOr<View> Find(uint32_t chunk) const;
  absl::StatusOr<View> Find(uint32_t chunk, int64_t begin, int64_t count) const;
  absl::StatusOr<View> FindKind(uint32_t chunk, StateKind kind, int64_t begin, int64_t count) const;
  // fp32 values of `kind`; of a rounded chunk's master those of its parameters.
  absl::Status ReadKind(const View& view, StateKind kind, uint64_t version, int64_t begin,
                        absl::Span<float> values) const;
  // `room`: for one block of values.
  absl::Status FillChunk(const Sources& sources, const std::atomic<bool>* stop, const View& view,
                         float* room);
  absl::Status FillBlock(const Sources& sources, const View& view, StateKind kind, int64_t begin,
                         int64_t end, float* out) const;
  absl::Status SetBlock(const View& view, StateKind kind, int block, int64_t begin,
                        absl::Span<const float> values);
  absl::Status ComputeRow(const Update& update, uint32_t chunk, int64_t begin, int64_t end,
                          const void* gradient, float* master, float* exp_avg, float* exp_avg_sq,
                          void* parameters) const;
  void OnUpdated(const std::shared_ptr<Update>& update, absl::Status status);
  // Remembers what makes the state useless, and passes it on.
  absl::Status Note(absl::Status status) const;

  const JobStateOptions options_;
  const DType type_;
  const bool momentum_only_;

  // Within the order of their ends: files before the queue, that before the buffers.
  std::shared_ptr<nvme::BufferArena> arena_;
  std::unique_ptr<nvme::AsyncIo> io_;
  std::shared_ptr<nvme::BufferPool> updates_, staged_, others_;
  // A section, for Change, Fill, FinishChunk and Digest, one at a time.
  mutable std::mutex moving_mutex_;
  std::shared_ptr<Buffer> moving_;
  // Bytes of the budget: a section, for what a snapshot's writer and reads of frozen chunks
  // convert.
  uint64_t for_writer_ = 0;
  std::atomic<uint64_t> buffer_bytes_ = 0;

  mutable std::mutex mutex_;
  mutable absl::Status health_;
  std::condition_variable changed_;
  Chunks chunks_;
  std::shared_ptr<Disk> disk_;
  uint64_t version_ = 0;
  int applies_ = 0;
  int reading_ = 0;  // sections, by writers of snapshots
  std::shared_ptr<Snapshot> snapshot_;
  std::mutex set_mutex_;  // SetState changes a block at a time

  std::shared_ptr<NvmePulls> pulls_;  // ends first
};

}  // namespace zeroshard::store
