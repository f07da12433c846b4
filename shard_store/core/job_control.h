// The control of one job on one store: which version its chunks have, which gradients are staged,
// what a directive makes it do. A pure state machine: no memory of the job, no threads, no clock,
// no sockets; the same inputs give the same outputs. Whoever drives it (shard_store/state) carries
// out the orders, says when they are done, and sends the report whenever it has changed.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/chunk_table.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::store {

// What to do, in this order. Work that is under way is ended before `load` and `forget`.
struct Orders {
  bool end_streams = false;  // bulk streams of generations before generation()
  bool forget = false;       // free everything
  bool load = false;         // free what is there, then fill every chunk as job() says
  bool drop_staging = false;
  std::optional<v1::StepDecision> apply;
  bool cancel_snapshot = false;
  std::optional<v1::SnapshotOrder>
      snapshot;                         // of the version here, before anything else is applied
  std::optional<uint64_t> digest_step;  // of the version here
};

class JobControl {
 public:
  explicit JobControl(std::string run_id);

  // FAILED_PRECONDITION: from a term, epoch or generation that is over; nothing changes then.
  // INVALID_ARGUMENT: it makes no sense (a map without this store, chunks that the table lacks).
  // A decision that cannot be applied (a gap, gradients that are not all here) fails the job here:
  // phase FAILED, with the reason. The same directive again does nothing.
  absl::StatusOr<Orders> OnDirective(const v1::StoreDirective& directive);

  // --- answers to orders. Each returns what can be done now that could not before. ---
  Orders OnLoaded(const absl::Status& status);
  void OnChunkApplied(uint32_t chunk, uint32_t digest);  // its new version may be pulled
  Orders OnApplied(const absl::Status& status);          // every chunk of the decision
  void OnSnapshot(const v1::SnapshotReport& report);
  void OnDigest(uint64_t step, uint64_t low, uint64_t high);
  // Something that is held here is damaged or lost.
  void Fail(const absl::Status& status);

  // --- bulk ---
  // Whether a stream of this generation may speak. UNAVAILABLE: not open here yet, come again;
  // FAILED_PRECONDITION: over.
  absl::Status CheckStream(uint64_t generation) const;
  // Whether these elements of a chunk may be staged now: FAILED_PRECONDITION names generation,
  // epoch or step seen and wanted; INVALID_ARGUMENT a range outside the chunk, a chunk that is not
  // here or not trained, a range that overlaps another of the same step without being equal to it.
  absl::Status CheckPush(uint64_t generation, uint64_t epoch, uint64_t step, uint32_t chunk,
                         uint32_t begin, uint32_t count) const;
  // They are staged. OK also where that is repeated; the errors of CheckPush where the generation
  // has ended meanwhile.
  absl::Status OnStaged(uint64_t generation, uint64_t epoch, uint64_t step, uint32_t chunk,
                        uint32_t begin, uint32_t count);
  enum class Pull { kReady, kWait };
  // Whether the parameters of a chunk can be had at this version. Of a frozen chunk any version is
  // the same.
  absl::StatusOr<Pull> CheckPull(uint64_t generation, uint64_t epoch, uint64_t step, uint32_t chunk,
                                 uint32_t begin, uint32_t count) const;

  // --- views ---
  const v1::StoreReport& report() const { return report_; }
  const v1::StoreJob& job() const { return job_; }
  uint64_t generation() const { return report_.generation(); }
  uint64_t epoch() const { return report_.version().epoch(); }
  // Chunks held here, by their number in the job's table.
  const std::map<uint32_t, Chunk>& chunks() const { return chunks_; }
  bool dropped() const { return report_.dropped(); }
};

}  // namespace zeroshard::store
