// The last part of a save, once every state file is in the checkpoint's folder: what travels along,
// the weights in 16 bits, the manifest. Ranks that save their own state and the coordinator, which
// has the stores' snapshots completed, both do it here.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/files.h"
#include "common/checkpoint/state_digest.h"
#include "common/checkpoint/store.h"
#include "zeroshard/v1/job.pb.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard {

// The folder that the files which travel with the model are in: the checkpoint's `resume_from` that
// the run goes on from (empty: none), else model.init_from; may be empty.
std::string FindModelFolder(const v1::JobSpec& spec, const std::string& resume_from);

// The files that travel with a model (ListHfAssets), and those of data.tokenizer in place of the
// model's own tokenizer's. Full paths, by the names they have in a checkpoint.
std::map<std::string, std::string> FindAssets(const v1::JobSpec& spec,
                                              const std::string& resume_from);

// What does not change from save to save. Read once, when a run begins: what it is in may be gone
// by the time of a save, as the checkpoint that a run goes on from.
struct SaveExtras {
  std::vector<Asset> assets;
  std::optional<int32_t> end_of_text;  // HfExportOptions::end_of_text
};
// `assets` as FindAssets gives them. The errors of ReadAssets and of Tokenizer::Load.
absl::StatusOr<SaveExtras> ReadSaveExtras(const v1::JobSpec& spec,
                                          const std::map<std::string, std::string>& assets);

// One state file and the digests of what is in it, by kind.
struct SavedPart {
  CheckpointFile file;
  WeightDigest digests[kStateKinds];
};

struct SaveContents {
  v1::JobSpec spec;  // with a checkpoint section
  std::string job, run_id;
  uint64_t step = 0, next_sample = 0, samples = 0;
  v1::LossScale loss_scale;      // Manifest's
  int64_t unix_ms = 0;           // when the save began
  bool trained = true;           // something is: there are moments
  std::vector<SavedPart> parts;  // by rank or store, at least one
  std::string folder;            // that all of them are in, CheckpointStore::Begin's
};

struct CompletedSave {
  std::string path;
  uint64_t bytes = 0;
};

// Writes assets and, where stage3_gather_16bit_weights_on_model_save asks for it, `model/`, then
// completes the checkpoint. `on_progress` (may be empty) is told that something advanced; `stopped`
// (may be empty) true gives up: CANCELLED or ABORTED. After an error the caller abandons the save.
// The errors of WriteAssets, CheckpointReader, ExportHfFolder and CheckpointStore::Complete.
absl::StatusOr<CompletedSave> CompleteSave(FileSystem* files, CheckpointStore* store,
                                           const SaveContents& contents, const SaveExtras& extras,
                                           const std::function<void()>& on_progress = nullptr,
                                           const std::function<bool()>& stopped = nullptr);

}  // namespace zeroshard
