// Finding checkpoints in a folder.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint/check.h"
#include "common/checkpoint/names.h"
#include "common/checkpoint/reader.h"
#include "common/checkpoint/store.h"
#include "common/files.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

// What `latest` says, or what is wrong with it.
struct Latest {
  std::string name;
  std::string problem;
};

Latest ReadLatest(const std::string& dir) {
  const std::string path = absl::StrCat(dir, "/", kLatestName);
  Latest latest;
  const absl::StatusOr<std::string> text = ReadFile(path, 4096);
  if (!text.ok()) {
    // A folder that has never had one is no oddity.
    if (!absl::IsNotFound(text.status())) latest.problem = std::string(text.status().message());
    return latest;
  }
  const std::string name(absl::StripAsciiWhitespace(*text));
  if (name.empty()) {
    latest.problem = absl::StrCat(path, " is empty");
  } else if (!StepOfName(name)) {
    latest.problem = absl::StrCat(path, " holds no checkpoint's name");
  } else if (std::error_code error; !std::filesystem::exists(absl::StrCat(dir, "/", name), error)) {
    latest.problem = absl::StrCat(path, " names ", name, ", which is not there");
  } else {
    latest.name = name;
  }
  return latest;
}

uint64_t BytesOnDisk(const std::string& path) {
  std::error_code error;
  uint64_t bytes = 0;
  for (std::filesystem::recursive_directory_iterator it(path, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code unknown;
    if (!it->is_regular_file(unknown)) continue;
    const uint64_t size = it->file_size(unknown);
    if (!unknown) bytes += size;
  }
  return bytes;
}

CheckpointSummary Summarise(const std::string& dir, uint64_t step) {
  CheckpointSummary summary;
  summary.step = step;
  summary.path = absl::StrCat(dir, "/", CheckpointName(step));
  const absl::StatusOr<Manifest> manifest = ReadAndCheckSizes(summary.path);
  if (!manifest.ok()) {
    summary.problem = std::string(manifest.status().message());
    summary.bytes = BytesOnDisk(summary.path);
    return summary;
  }
  summary.unix_ms = manifest->unix_ms;
  summary.run_id = manifest->run_id;
  for (const CheckpointFile& file : manifest->files) summary.bytes += file.bytes;
  if (manifest->step != step) {
    summary.problem = absl::StrCat(summary.path, "/", kManifestName, " is of step ", manifest->step,
                                   "; wanted the step of the folder's name");
    return summary;
  }
  summary.complete = true;
  return summary;
}

absl::StatusOr<std::vector<uint64_t>> StepsIn(const std::string& dir) {
  std::error_code error;
  std::vector<uint64_t> steps;
  for (std::filesystem::directory_iterator it(dir, error), end; !error && it != end;
       it.increment(error)) {
    if (const auto step = StepOfName(it->path().filename().string())) steps.push_back(*step);
  }
  if (error) return ErrnoError(error.value(), "list", dir);
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::string WithoutSlash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

}  // namespace

bool IsCheckpointPath(const std::string& given) {
  const std::string path = WithoutSlash(given);
  std::error_code error;
  return StepOfName(path.substr(path.rfind('/') + 1)).has_value() ||
         std::filesystem::exists(absl::StrCat(path, "/", kManifestName), error);
}

absl::StatusOr<Manifest> ReadAndCheckSizes(const std::string& path) {
  const std::string where = absl::StrCat(path, "/", kManifestName);
  const absl::StatusOr<std::string> text = ReadFile(where);
  if (absl::IsNotFound(text.status())) {
    struct stat status;
    if (stat(path.c_str(), &status) != 0) return ErrnoError(errno, "find", path);
    return absl::DataLossError(
        absl::StrCat(path, " has no ", kManifestName, ": its save did not end"));
  }
  if (!text.ok()) return text.status();
  ZS_ASSIGN_OR_RETURN(Manifest manifest, ParseManifest(*text, where));
  for (const CheckpointFile& file : manifest.files) {
    const std::string name = absl::StrCat(path, "/", file.name);
    struct stat status;
    if (stat(name.c_str(), &status) != 0) {
      return absl::DataLossError(absl::StrCat(ErrnoError(errno, "find", name).message(), "; ",
                                              kManifestName, " names it"));
    }
    if (!S_ISREG(status.st_mode) || static_cast<uint64_t>(status.st_size) != file.bytes) {
      return absl::DataLossError(
          absl::StrCat(name,
                       S_ISREG(status.st_mode) ? absl::StrCat(" has ", status.st_size, " bytes")
                                               : std::string(" is no regular file"),
                       "; ", kManifestName, " wants ", file.bytes, " bytes"));
    }
  }
  return manifest;
}

absl::StatusOr<std::vector<CheckpointSummary>> ListCheckpoints(const std::string& dir) {
  const std::string folder = WithoutSlash(dir);
  ZS_ASSIGN_OR_RETURN(const std::vector<uint64_t> steps, StepsIn(folder));
  const std::string latest = ReadLatest(folder).name;
  std::vector<CheckpointSummary> list;
  for (const uint64_t step : steps) {
    list.push_back(Summarise(folder, step));
    list.back().latest = latest == CheckpointName(step);
  }
  return list;
}

absl::StatusOr<FoundCheckpoint> FindCheckpoint(const std::string& given) {
  FoundCheckpoint found;
  const std::string path = WithoutSlash(given);
  if (IsCheckpointPath(path)) {
    ZS_ASSIGN_OR_RETURN(found.manifest, ReadAndCheckSizes(path));
    found.path = path;
    return found;
  }
  ZS_ASSIGN_OR_RETURN(const std::vector<uint64_t> steps, StepsIn(path));
  if (const Latest latest = ReadLatest(path); !latest.problem.empty()) {
    found.skipped.push_back(latest.problem);
  }
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const CheckpointSummary summary = Summarise(path, *step);
    if (!summary.complete) {
      found.skipped.push_back(summary.problem);
      continue;
    }
    ZS_ASSIGN_OR_RETURN(found.manifest, ReadAndCheckSizes(summary.path));
    found.path = summary.path;
    return found;
  }
  constexpr size_t kNamed = 5;
  const size_t more = found.skipped.size() > kNamed ? found.skipped.size() - kNamed : 0;
  found.skipped.resize(found.skipped.size() - more);
  return absl::NotFoundError(absl::StrCat(
      "no complete checkpoint in ", path, found.skipped.empty() ? "" : ": ",
      absl::StrJoin(found.skipped, "; "), more > 0 ? absl::StrCat("; and ", more, " more") : ""));
}

}  // namespace zeroshard
