// The control of one job on one store: which version its chunks have, which gradients are staged,
// what a directive makes it do. A pure state machine: no memory of the job, no threads, no clock,
// no sockets; the same inputs give the same outputs. Whoever drives it (shard_store/state) carries
// out the orders, says when they are done, and sends the report whenever it has changed.
//
// After every call that may change something the driver compares report() with what it sent last,
// and asks CheckPull again for every pull that waits (one that now fails is ended with that error).
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/plan/chunk_table.h"
#include "shard_store/core/staging.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::store {

// In the placement of a map: there is no store for this replica.
inline constexpr uint32_t kNoStore = 0xffffffff;

// What to do, in this order.
struct Orders {
  bool end_streams = false;  // bulk streams of generations before generation()
  // Before these two, work that is under way (loading, applying, digests, a snapshot) is ended, and
  // none of its results are told any more.
  bool forget = false;  // free everything
  bool load = false;    // free what is there, then fill every chunk as job() says,
  // except these chunks, which stay as they are: other stores of the job have changed. Those of
  // chunks() that are not among them come from where job().copies() says, else from job().base().
  std::vector<uint32_t> keep;
  // What is staged is of no use any more; nothing is being applied. A generation that opens while a
  // step is applied does not order this: what was staged for the step after it counts for nothing
  // either, and is overwritten.
  bool drop_staging = false;
  bool cancel_snapshot = false;
  std::optional<v1::SnapshotOrder> snapshot;  // of the version here
  std::optional<v1::StepDecision> apply;      // with what is staged, which is free afterwards
  std::optional<uint64_t> digest_step;        // of the version here; never with `apply`
};

class JobControl {
 public:
  // `chunk_elements` other than the default: tests alone.
  explicit JobControl(std::string run_id, int64_t chunk_elements = kChunkElements);

  // FAILED_PRECONDITION: from a term, epoch, generation, map or step that is over, or it builds on
  // a map that is not here; nothing changes then, and the report should be sent (again).
  // INVALID_ARGUMENT: it makes no sense (a map without this store, chunks that the table lacks);
  // nothing changes either. `self` is the incarnation of this process now; FAILED_PRECONDITION also
  // where the map, or without one the map that is here, puts another in its place. Empty: unknown,
  // and not compared.
  // A decision that cannot be applied (a gap, gradients that are not all here) fails the job here:
  // phase FAILED, with the reason. The same directive again does nothing.
  absl::StatusOr<Orders> OnDirective(const v1::StoreDirective& directive,
                                     absl::string_view self = {});

  // --- answers to orders. Each returns what can be done now that could not before. ---
  Orders OnLoaded(const absl::Status& status);
  void OnChunkApplied(uint32_t chunk, uint32_t digest);  // its new version may be pulled
  Orders OnApplied(const absl::Status& status);          // every chunk of the decision
  void OnSnapshot(const v1::SnapshotReport& report);
  void OnDigest(uint64_t step, uint64_t low, uint64_t high);
  // Something was loaded or written.
  void OnProgress() { report_.set_progress(report_.progress() + 1); }
  // Something that is held here is damaged or lost. Only a new epoch or map ends that.
  void Fail(const absl::Status& status);

  // --- bulk ---
  // Whether a stream of this generation may speak. UNAVAILABLE: not open here yet, or the state
  // here is of no use: come again; FAILED_PRECONDITION: over.
  absl::Status CheckStream(uint64_t generation) const;
  // Whether who says this hello may have a stream: CheckStream and, of a rank, that no other member
  // or incarnation has had one as that rank in this generation (FAILED_PRECONDITION names both; a
  // generation's ranks never change); of a store, CheckPeer. RESOURCE_EXHAUSTED: more ranks than a
  // job can have.
  absl::Status Admit(const v1::BulkHello& hello);
  // Whether the map here puts chunks on this store. FAILED_PRECONDITION: on another incarnation of
  // it. UNAVAILABLE: not at all, but a map may be on its way that does.
  absl::Status CheckPeer(absl::string_view member, absl::string_view incarnation) const;
  // Whether these elements of a chunk may be staged now. FAILED_PRECONDITION names generation,
  // epoch or step seen and wanted; INVALID_ARGUMENT a range outside the chunk, a chunk that is not
  // here or not trained, a range that overlaps another of the same step without being equal to it.
  // ALREADY_EXISTS: the step is decided, so these elements were staged before; nothing is to be
  // written, and the answer to the rank is that they are staged. UNAVAILABLE: the chunk is still
  // being loaded or brought to the version before (another replica of it was quicker): ask again
  // after OnLoaded, OnChunkApplied or OnApplied.
  absl::Status CheckPush(uint64_t generation, uint64_t epoch, uint64_t step, uint32_t chunk,
                         uint32_t begin, uint32_t count) const;
  // They are staged. OK also where that is repeated; the errors of CheckPush (except
  // ALREADY_EXISTS) where the generation has ended meanwhile.
  absl::Status OnStaged(uint64_t generation, uint64_t epoch, uint64_t step, uint32_t chunk,
                        uint32_t begin, uint32_t count);
  enum class Pull { kReady, kWait };
  // Whether the parameters of a chunk can be had at this version. Of a frozen chunk any version is
  // the same. FAILED_PRECONDITION: that version is gone, or too far ahead; generation or epoch are
  // others. UNAVAILABLE as CheckStream. INVALID_ARGUMENT: no such elements here.
  absl::StatusOr<Pull> CheckPull(uint64_t generation, uint64_t epoch, uint64_t step, uint32_t chunk,
                                 uint32_t begin, uint32_t count) const;

  // --- views ---
  // While LOADING, `version` is the one that is being loaded. `usage` is the driver's.
  const v1::StoreReport& report() const { return report_; }
  const v1::StoreJob& job() const { return job_; }
  uint64_t generation() const { return report_.generation(); }
  uint64_t epoch() const { return report_.version().epoch(); }
  // Chunks held here, by their number in the job's table.
  const std::map<uint32_t, Chunk>& chunks() const { return chunks_; }
  bool dropped() const { return report_.dropped(); }
  // In words, what is missing before the next step is sealed: "chunk 3 lacks 128 of 1048576
  // elements, the first is 64 (and 2 chunks more)". Empty where nothing is.
  std::string MissingGradients() const;

 private:
  // A directive's job, checked against its table.
  struct Map {
    v1::StoreJob job;
    uint64_t version = 0;
    std::map<uint32_t, Chunk> chunks;
    std::set<uint32_t> copied;  // from other stores
    std::set<uint32_t> placed;  // stores that have chunks
    size_t table_size = 0;
  };
  // directive.cc
  absl::Status CheckCounters(const v1::StoreDirective& directive) const;
  absl::Status CheckSelf(const v1::StoreDirective& directive, absl::string_view self) const;
  absl::Status CheckContents(const v1::StoreDirective& directive,
                             const std::optional<Map>& map) const;
  bool NeedsMap(const v1::StoreDirective& directive) const;
  absl::StatusOr<Map> ReadMap(const v1::StoreDirective& directive) const;

  // Does what the checked directive asks for, or keeps it in `waiting_` until a step is applied.
  void Follow(const v1::StoreDirective& directive, const std::optional<Map>& map, Orders* orders);
  // False: it has to wait.
  bool TakeMap(const v1::StoreDirective& directive, const Map& map, Orders* orders);
  void BeginLoad(const v1::StoreDirective& directive, const Map& map, std::set<uint32_t> keep,
                 uint64_t step, Orders* orders);
  void TakeDecision(const v1::StepDecision& decision, Orders* orders);
  void TakeSnapshot(const v1::StoreDirective& directive, Orders* orders);
  // Snapshots and digests whose version is here.
  void StartWhatWaits(Orders* orders);
  void ClearStaging();
  void MaybeSeal();
  bool Held() const;  // there is a map here
  uint64_t VersionOf(uint32_t chunk) const;
  absl::Status CheckElements(uint32_t chunk, uint32_t begin, uint32_t count) const;

  const int64_t chunk_elements_;
  v1::StoreReport report_;
  v1::StoreJob job_;
  std::map<uint32_t, Chunk> chunks_;
  std::set<uint32_t> placed_;  // stores of the map that have chunks
  std::set<uint32_t> valid_;   // chunks that have the version, while others are loaded
  std::optional<v1::StepDecision> applying_;
  std::map<uint32_t, uint32_t> applied_;  // by chunk that has its new version: digest
  std::map<uint32_t, uint32_t> digests_;  // by chunk, of the version; empty: unknown

  // Of the generation that is open: member and incarnation of each rank that has had a stream.
  std::map<uint32_t, std::pair<std::string, std::string>> ranks_;

  std::map<uint32_t, Coverage> staging_;  // of the next step, by trained chunk
  uint64_t missing_ = 0;                  // elements that it lacks

  std::optional<v1::SnapshotOrder> snapshot_;
  bool snapshot_started_ = false;
  uint64_t digest_wanted_ = 0;
  bool digest_started_ = false;

  struct Waiting {
    v1::StoreDirective directive;
    std::optional<Map> map;
  };
  std::optional<Waiting> waiting_;
};

}  // namespace zeroshard::store
