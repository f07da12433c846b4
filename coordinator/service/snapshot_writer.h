// The coordinator's part of the checkpoints of offloaded jobs: it owns their folders, and completes
// what the shard stores have written into them.
#pragma once

#include <functional>
#include <memory>

#include "common/checkpoint/file_system.h"
#include "common/clock.h"
#include "coordinator/core/events.h"

namespace zeroshard::coordinator {

// Each checkpoint folder has a thread of its own, which does what was asked of it in order: a
// folder whose server hangs holds up nobody else, and a run that begins in a folder which another
// one is just letting go of waits for it. Thread-safe; no call waits for a disk.
class SnapshotWriter {
 public:
  struct Options {
    FileSystem* files = nullptr;   // outlives the process's threads: FileSystem::Real() or a test's
    const Clock* clock = nullptr;  // likewise
    // Told what became of a request, once each, from any thread, with no lock held; never again
    // after the destructor has begun.
    std::function<void(Event)> post;
  };

  explicit SnapshotWriter(Options options);
  // Cuts the completion that is under way short: its files are left for the next start to sweep.
  // Waits two seconds for the threads; one that hangs in the system is left behind for the end of
  // the process.
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // Answered by SnapshotsOpened: the errors of CheckpointStore::Open and ReadSaveExtras. A run that
  // is open already is answered OK and stays as it is.
  void Do(OpenSnapshots request);
  // Answered by SnapshotBegun: ALREADY_EXISTS, a complete checkpoint of this step is there;
  // FAILED_PRECONDITION: the run's folder is not open; else what the file system says. What an
  // earlier step left unfinished is removed.
  void Do(BeginSnapshot request);
  // Answered by SnapshotCompleted; what cannot be completed is abandoned, and the record says why.
  void Do(CompleteSnapshot request);
  // Answered by SnapshotCompleted, unless that step was completed before.
  void Do(AbandonSnapshot request);
  // Not answered.
  void Do(CloseSnapshots request);

 private:
  struct Shared;
  struct Folder;
  const std::shared_ptr<Shared> shared_;  // with the threads
};

}  // namespace zeroshard::coordinator
