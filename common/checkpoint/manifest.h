// What a checkpoint folder holds (architecture, section 8):
//
//   <dir>/step-00000100/state-00000-of-00004.safetensors   one a rank that wrote it
//                       assets/config.json, assets/tokenizer.json, ...   of a Hugging Face model
//                       model/...                          where 16-bit weights are asked for
//                       manifest.json                      last of all: without it, no checkpoint
//   <dir>/latest                                           a text file: step-00000100
//   <dir>/lock                                             the job that writes here
//
// A state file is safetensors. Its tensors are fp32 ranges of the model table's tensors, named
// "<kind>/<tensor>" (whole, in its shape) or "<kind>/<tensor>/<begin>-<end>" (elements, row by
// row), where kind is master, exp_avg or exp_avg_sq. Of a tensor that is there in parts the
// metadata have the whole shape: "shape:wte.weight": "50257x768". Padding is not stored; a frozen
// tensor has only its master.
//
// manifest.json is one JSON object whose last key is the CRC-32C of everything before its comma.
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "zeroshard/v1/job.pb.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard {

enum class StateKind : uint8_t { kMaster, kExpAvg, kExpAvgSq };
constexpr int kStateKinds = 3;
const char* NameOf(StateKind kind);

struct CheckpointFile {
  std::string name;  // relative to the checkpoint's folder, never leaving it
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
};

struct Manifest {
  std::string run_id;
  std::string job;
  uint64_t step = 0;  // of the last update in it; Adam's t, but for loss_scale.skipped_steps
  int64_t unix_ms = 0;
  uint32_t world_size = 0;   // that wrote it
  v1::JobSpec spec;          // normalised
  uint64_t next_sample = 0;  // position in the run's sample order of the next step's first sample
  uint64_t samples = 0;      // that the training set has
  v1::LossScale loss_scale;  // of the next step; the default message: none, as of all but fp16 jobs
  // Of all values of a kind, as state_digest.h has it; empty where no tensor has the kind.
  std::string digests[kStateKinds];
  std::vector<CheckpointFile> files;  // all but manifest.json itself
};

// JSON with a checksum of its own.
std::string FormatManifest(const Manifest& manifest);
// INVALID_ARGUMENT or DATA_LOSS name `where`, the field, what was seen and what was wanted.
absl::StatusOr<Manifest> ParseManifest(absl::string_view json, const std::string& where);

}  // namespace zeroshard
