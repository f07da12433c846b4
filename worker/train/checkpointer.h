// Saves checkpoints off the training path. After a step each rank's thread copies what the rank
// owns of the state into memory that is set aside for it. Nothing changes that state before the
// next optimizer step, so the next forward and backward run meanwhile, and training waits for what
// is left of the copy then. The thread goes on to compute digests and to write the rank's file,
// while the ranks tell each other in the exchange that ends every step how far they are:
//
//   rank 0                          the others                      what the flags say
//   makes the folder                wait                            kCollecting
//   writes its file                 write theirs                    kWriting
//   (every rank's part is done or failed: all gather one report each)   kWritten, kFailed
//   assets, 16-bit weights,
//   manifest, rename, deletions     are free again                  kCompleting, kIdle
//
// A part that fails abandons the save on every rank, and training goes on. One instance a rank,
// used by its training thread; collective calls are made by all ranks after the same exchange.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/checkpoint/files.h"
#include "common/checkpoint/store.h"
#include "common/saving/completion.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"
#include "worker/device/host_stream.h"
#include "worker/train/step_stats.h"
#include "worker/zero/engine.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard {

enum class SaveState : uint8_t { kIdle, kCollecting, kWriting, kWritten, kFailed, kCompleting };

struct CheckpointerOptions {
  v1::JobSpec spec;  // with a checkpoint section
  std::string job, run_id;
  std::string resumed_from;  // CheckpointStoreOptions::resumed_from
  uint64_t samples = 0;      // of the training set
  // Files that rank 0 puts into each checkpoint: path by name. Read once, in Create: what they are
  // in may be gone by the time of a save, as the checkpoint that a run goes on from.
  std::map<std::string, std::string> assets;
  const ModelTable* model = nullptr;  // the full one; these outlive the checkpointer
  const ZeroEngine* engine = nullptr;
  Device* device = nullptr;
  Communicator* comm = nullptr;
  FileSystem* files = nullptr;
};

// What the step after a saved one begins with, beside the state.
struct NextStep {
  uint64_t sample = 0;       // position in the run's order of its first sample
  v1::LossScale loss_scale;  // of fp16 jobs
};

class Checkpointer {
 public:
  // Collective: rank 0 reads the assets and takes the folder, all set memory aside for one copy of
  // what they own (12 bytes an element). The same error on all ranks: FAILED_PRECONDITION names who
  // holds the folder, RESOURCE_EXHAUSTED the bytes.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Create(const CheckpointerOptions& options);
  // Cuts a save that is being written short, and abandons it; one that is being completed is.
  ~Checkpointer();

  // What this rank has to say in the next exchange.
  SaveState state() const;
  // Whether this rank's thread is at work: its state may change by itself.
  bool Busy() const;
  // Grows with what this rank's thread gets done.
  uint64_t progress() const { return progress_; }

  // Begins to copy the state after `step`; every rank must be idle. `waited`: how long training
  // waited for the save before.
  void Start(uint64_t step, const NextStep& next, absl::Duration waited);
  // Before the state changes: waits for the copy, which waits for nothing but memory.
  void WaitForCopy();

  // Collective after each exchange of flags (the same on every rank): begins to write, gathers the
  // reports when every part is done. The error of a collective; never that of a save.
  absl::Status Advance(const std::vector<RankFlags>& flags);

  // Rank 0: what became of a save, once each.
  std::optional<v1::CheckpointRecord> TakeRecord();
  // Rank 0, when idle: how the latest save ended.
  const absl::Status& outcome() const { return outcome_; }
  // The step of the latest Start; 0: none.
  uint64_t step() const { return step_; }

 private:
  struct Report;
  class CancellableFiles;

  explicit Checkpointer(const CheckpointerOptions& options);
  absl::Status Open();
  absl::Status Allocate();
  void MakePieces();
  // Those ranges that keep fp32 values, or those that do not (ZeroEngine::CopyState).
  absl::Status Copy(bool kept);
  absl::Status WriteOwn();
  // Collective: the digests of the blocks that several ranks have parts of become rank 0's.
  absl::Status JoinTornBlocks(std::vector<Report>* reports) const;
  void FillReport(Report* report) const;
  // Rank 0's thread.
  absl::Status Complete(const std::vector<Report>& reports);
  absl::Status Finish(const std::vector<Report>& reports);
  bool IsRankZero() const { return options_.comm->rank() == 0; }

  const CheckpointerOptions options_;
  std::string dir_;
  SaveExtras extras_;                       // rank 0's
  std::unique_ptr<CheckpointStore> store_;  // rank 0's
  std::unique_ptr<CancellableFiles> files_;
  std::vector<OwnedRange> ranges_;
  Buffer memory_[kStateKinds];
  std::vector<StatePiece> pieces_;  // of memory_

  // Of the save on its way. The thread writes what is below `written_` before the event is done.
  uint64_t step_ = 0;
  NextStep next_;
  absl::Time started_;
  absl::Duration waited_, pause_;
  SaveState phase_ = SaveState::kIdle;  // where nothing is known of the thread
  Event copied_, written_, completed_;
  std::atomic<bool> begun_{false};
  CheckpointFile file_;
  PartedDigest digests_[kStateKinds];
  v1::CheckpointRecord record_;
  absl::Status outcome_;
  bool recorded_ = true;

  std::atomic<uint64_t> progress_{0};
  std::atomic<bool> cancelled_{false};
  std::unique_ptr<HostStream> thread_;  // last: it uses all of the above
};

// Whether no rank has a save on its way.
bool AllIdle(const std::vector<RankFlags>& flags);

}  // namespace zeroshard
