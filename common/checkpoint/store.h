// Writing checkpoints. Every rank writes its own file; one process (rank 0) owns the folder: it
// begins, completes, abandons and deletes. Every change goes through FileSystem, so that tests can
// fail or kill at each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/file_system.h"
#include "common/checkpoint/manifest.h"

namespace zeroshard {

// A range of one tensor's state. Borrowed.
struct StatePiece {
  StateKind kind = StateKind::kMaster;
  std::string tensor;
  std::vector<int64_t> shape;     // of the whole tensor
  int64_t begin = 0, end = 0;     // elements
  const float* values = nullptr;  // end - begin
};

// step-00000100
std::string CheckpointName(uint64_t step);
// Where step's files are collected before they are complete: <dir>/.step-00000100.tmp
std::string CollectFolder(const std::string& dir, uint64_t step);

// Writes <folder>/state-<rank>-of-<world>.safetensors and syncs it. Errors name path and reason.
absl::StatusOr<CheckpointFile> WriteStateFile(FileSystem* files, const std::string& folder,
                                              int rank, int world,
                                              const std::vector<StatePiece>& pieces);

// The same with values that are asked for when they are written, piece after piece: those of a
// piece stay until the next is asked for. StatePiece::values are not looked at. Errors of `values`
// end it.
using PieceValues = std::function<absl::StatusOr<const float*>(size_t piece)>;
absl::StatusOr<CheckpointFile> WriteStateFile(FileSystem* files, const std::string& folder,
                                              int rank, int world,
                                              const std::vector<StatePiece>& pieces,
                                              const PieceValues& values);

struct CheckpointStoreOptions {
  std::string dir;
  std::string job;
  std::string run_id;
  uint32_t keep_last = 0;   // 0: all
  uint64_t keep_every = 0;  // 0: none beyond
  // The checkpoint that this run goes on from, in `dir` or elsewhere; empty: a fresh start, also
  // where only weights are taken from one.
  std::string resumed_from;
};

// The owner of a folder. One thread at a time.
class CheckpointStore {
 public:
  // Makes the folder, takes its lock, and sweeps what a killed save left behind.
  // FAILED_PRECONDITION: another job holds it (naming job, run, host and process), or it holds
  // complete checkpoints and this run goes on from none of them (naming the newest), whatever their
  // run ids: those repeat between coordinators.
  // Checkpoints newer than the one resumed from are moved aside (step-00000150.aside), never
  // overwritten.
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(
      FileSystem* files, const CheckpointStoreOptions& options);
  virtual ~CheckpointStore() = default;

  // An empty folder for the step's files, which every rank writes into. Returns its path.
  // ALREADY_EXISTS: this step is saved already, completely (the one resumed from).
  virtual absl::StatusOr<std::string> Begin(uint64_t step) = 0;
  // Writes the manifest, renames the folder, replaces `latest`, then deletes what the rule says.
  // Returns the checkpoint's path. FAILED_PRECONDITION: a file that the manifest names is not there
  // as its rank wrote it. An old checkpoint that cannot be deleted is logged and no error.
  virtual absl::StatusOr<std::string> Complete(const Manifest& manifest) = 0;
  // Removes what a save that failed has written so far.
  virtual void Abandon(uint64_t step) = 0;
};

}  // namespace zeroshard
