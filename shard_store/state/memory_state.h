// JobState in the host's memory. Within this library.
//
// One mutex guards the table of chunks, which buffer of a chunk is published, and what a snapshot
// still wants; values are read and written outside it. Nothing in the pool ever waits: an update
// that has to (a snapshot wants its chunk and there is no room for a copy) is put aside and added
// to the pool again by whoever makes that possible. The mutex is held for the table alone: memory
// of chunks and copies is given back outside it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shard_store/state/job_state.h"
#include "shard_store/state/memory_chunk.h"
#include "shard_store/state/optimizer.h"
#include "shard_store/state/retries.h"

namespace zeroshard::store {

class MemoryState : public JobState {
 public:
  // Without chunks: Change gives it those.
  explicit MemoryState(const JobStateOptions& options);
  ~MemoryState() override;

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
  absl::Status Stage(uint32_t chunk, uint64_t step, int64_t begin, int64_t count,
                     absl::Span<const absl::Span<const char>> parts) override;
  void Apply(const v1::StepDecision& decision,
             std::function<void(uint32_t chunk, uint32_t digest)> on_chunk,
             std::function<void(const absl::Status&)> done) override;
  absl::StatusOr<PinnedParameters> Parameters(uint32_t chunk, int64_t begin,
                                              int64_t count) override;
  void PreserveSnapshot(const v1::SnapshotOrder& order) override;
  v1::SnapshotReport WriteSnapshot(FileSystem* files, const std::function<void(uint64_t)>& progress,
                                   const std::atomic<bool>* stop) override;
  void EndSnapshot() override;
  absl::StatusOr<WeightDigest> Digest(absl::Span<const uint32_t> chunks) const override;
  v1::StoreUsage usage() const override;
  bool Free() override;

 private:
  using ChunkPtr = std::shared_ptr<MemoryChunk>;
  struct Update;       // one Apply
  struct ChunkUpdate;  // a chunk's part of it
  struct Snapshot;
  class SnapshotWriter;

  // Locks the mutex.
  absl::StatusOr<ChunkPtr> Find(uint32_t chunk) const;
  absl::StatusOr<ChunkPtr> Find(uint32_t chunk, int64_t begin, int64_t count) const;
  absl::StatusOr<ChunkPtr> FindKind(uint32_t chunk, StateKind kind, int64_t begin,
                                    int64_t count) const;
  absl::StatusOr<std::vector<ChunkPtr>> FindAll(absl::Span<const uint32_t> chunks) const;
  absl::Status FillChunk(const Sources& sources, const std::atomic<bool>* stop,
                         MemoryChunk* chunk) const;
  void PlaceOnNodes(const std::vector<ChunkPtr>& chunks) const;
  absl::Status Touch(const std::vector<ChunkPtr>& chunks) const;

  // --- memory_apply.cc ---
  void BeginChunk(const std::shared_ptr<ChunkUpdate>& update);
  // RESOURCE_EXHAUSTED: readers hold the parameters, and there is no memory for others yet.
  absl::Status ChooseTarget(ChunkUpdate* update);
  absl::Status TooLate(const ChunkUpdate& update, const absl::Status& lack) const;
  void UpdatePart(const std::shared_ptr<ChunkUpdate>& update, int64_t begin, int64_t end);
  void PublishChunk(const std::shared_ptr<ChunkUpdate>& update);
  void LetGoAndEnd(const std::shared_ptr<ChunkUpdate>& update, const absl::Status& status);
  void EndChunk(const std::shared_ptr<Update>& update, const absl::Status& status);

  // --- memory_snapshot.cc ---
  // Whether the chunk may change now, after copying it where the snapshot wants that. False: the
  // task was put aside and will be added to the pool again.
  bool LetGo(const ChunkPtr& chunk, std::function<void()> retry);
  void Resume(uint32_t chunk);  // under the mutex
  void ResumeOnePending();      // under the mutex

  const v1::JobSpec spec_;
  const ModelTable* const model_;
  const bool digests_;
  MemoryBudget* const budget_;
  MemoryBudget* const writing_;
  TaskPool* const pool_;
  const DType type_;
  const bool momentum_only_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint32_t, ChunkPtr> chunks_;
  int applies_ = 0;  // under way
  int reading_ = 0;  // chunks, by writers of snapshots
  std::shared_ptr<Snapshot> snapshot_;
  std::map<uint32_t, std::function<void()>> aside_;  // by chunk: updates that wait for a snapshot
  Retries retries_{pool_};                           // updates that wait for memory
};

}  // namespace zeroshard::store
