// Finding, checking and reading checkpoints.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/manifest.h"
#include "common/parameter_source.h"

namespace zeroshard {

struct CheckpointSummary {
  uint64_t step = 0;
  std::string path;
  bool complete = false;
  std::string problem;  // why it is not
  uint64_t bytes = 0;
  int64_t unix_ms = 0;
  std::string run_id;
  bool latest = false;  // what `latest` names
};

// What a folder of checkpoints holds, by step: complete means that the manifest is sound and every
// file is there in its size. NOT_FOUND: no such folder.
absl::StatusOr<std::vector<CheckpointSummary>> ListCheckpoints(const std::string& dir);

// Whether FindCheckpoint takes `path` for one checkpoint: it holds a manifest, or is named like
// one.
bool IsCheckpointPath(const std::string& path);

struct FoundCheckpoint {
  std::string path;
  Manifest manifest;
  std::vector<std::string> skipped;  // newer ones that are not complete, each with its reason
};

// `path`: one checkpoint, which must then be complete, or a folder of them, of which the newest
// complete one is taken, whatever `latest` says. NOT_FOUND lists what was skipped and why.
absl::StatusOr<FoundCheckpoint> FindCheckpoint(const std::string& path);

// Thread-safe. The state files stay open and are read, not mapped: values go straight where they
// are wanted, no page of them counts as this process's memory, and a disk's error is an error.
class CheckpointReader {
 public:
  // Checks the manifest, the sizes and every header: the ranges of each tensor and kind tile it
  // without gap or overlap. DATA_LOSS or INVALID_ARGUMENT name file and tensor; where that is
  // because a file is damaged, the file and its checksum, as VerifyFiles does.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(const std::string& path);
  // The same of a save's files before its manifest is written: `manifest` lists them.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenCollected(const std::string& folder,
                                                                         Manifest manifest);
  virtual ~CheckpointReader() = default;

  virtual const Manifest& manifest() const = 0;
  virtual const std::string& path() const = 0;

  // Checks the checksums of every share-th file, of `shares`: ranks verify together what they load
  // together. `on_bytes`, where there is one, is told of every part read. DATA_LOSS names the file,
  // the checksum seen and the one wanted; CANCELLED once `stop` (may be null) is true. Fastest on a
  // thread of its own (std::async) while values are read, so that the disk gives every byte once;
  // nothing may be used before it is OK.
  virtual absl::Status VerifyFiles(int share, int shares,
                                   const std::function<void(uint64_t bytes)>& on_bytes = nullptr,
                                   const std::atomic<bool>* stop = nullptr) const = 0;

  // INVALID_ARGUMENT lists up to ten tensors of `model` that the checkpoint lacks, has in another
  // shape, or has beyond it. `moments`: also wants those of its own optimizer (SGD: exp_avg
  // alone) of what is trainable.
  virtual absl::Status CheckModel(const ModelTable& model, bool moments) const = 0;

  // The values of one kind; borrows this reader.
  virtual std::unique_ptr<ParameterSource> Source(StateKind kind) const = 0;
};

}  // namespace zeroshard
