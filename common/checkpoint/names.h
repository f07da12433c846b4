// Names in a folder of checkpoints, for this library alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/manifest.h"

namespace zeroshard {

inline constexpr char kManifestName[] = "manifest.json";
inline constexpr char kLatestName[] = "latest";
inline constexpr char kLockName[] = "lock";
inline constexpr char kAssets[] = "assets";

// The step of a name as CheckpointName gives it; none for any other name.
std::optional<uint64_t> StepOfName(absl::string_view name);

// What a save or a deletion that was killed leaves behind: .step-*.tmp, .step-*.old, .latest.tmp.
bool IsLeftover(absl::string_view name);
std::string DeleteFolder(const std::string& dir, uint64_t step);  // <dir>/.step-00000100.old
std::string LatestTemporary(const std::string& dir);              // <dir>/.latest.tmp

// state-00000-of-00004.safetensors
std::string StateFileName(int rank, int world);
bool IsStateFileName(absl::string_view name);

// A relative path with no way out: no empty part, ".", "..", no control characters, at most 1024
// bytes.
bool StaysInside(absl::string_view name);

// "blocks.3.attn.q.weight" of a state file's tensor, and which of its elements.
struct StateName {
  StateKind kind = StateKind::kMaster;
  std::string tensor;
  bool whole = true;
  int64_t begin = 0, end = 0;  // where not whole
};
std::string FormatStateName(const StateName& name);
// None for what FormatStateName never gives.
std::optional<StateName> ParseStateName(absl::string_view text);

// Where a tensor is there in parts only, the file's metadata have its shape: "shape:wte.weight" is
// "50257x768"; of a scalar it is empty.
std::string ShapeKey(const std::string& tensor);
std::string FormatShape(const std::vector<int64_t>& shape);
std::optional<std::vector<int64_t>> ParseShape(absl::string_view text);

// The product; none where an extent is negative or the values have no 2^62 bytes.
std::optional<int64_t> ElementsOf(const std::vector<int64_t>& shape);

// Absolute, without links where it exists, without a slash at the end.
std::string CanonicalPath(const std::string& path);

}  // namespace zeroshard
