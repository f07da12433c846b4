#include "client/resume.h"

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/folder_lock.h"
#include "common/checkpoint/reader.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

using Notice = std::function<void(const std::string&)>;

// Moves what a job wrote into the folder, and nothing else that may be there, to one inside. Nobody
// else may hold the folder's lock meanwhile.
absl::Status MoveAside(const std::string& job, const std::string& dir, const Notice& notice) {
  std::error_code error;
  if (!fs::exists(dir, error)) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(const auto lock, CheckpointLock::Take(dir, job, "zeroshard local --fresh"));
  std::vector<fs::path> written;
  for (fs::directory_iterator at(dir, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (name == "latest" || IsCheckpointPath(at->path().string())) written.push_back(at->path());
  }
  if (written.empty() && !error) return absl::OkStatus();
  int n = 1;
  while (fs::exists(absl::StrCat(dir, "/old-", n), error)) ++n;
  const fs::path aside = absl::StrCat(dir, "/old-", n);
  fs::create_directory(aside, error);
  for (size_t i = 0; i < written.size() && !error; ++i) {
    fs::rename(written[i], aside / written[i].filename(), error);
  }
  if (error) {
    return absl::InternalError(absl::StrCat("cannot move the checkpoints in ", dir, " to ",
                                            aside.string(), ": ", error.message()));
  }
  notice(absl::StrCat("the checkpoints of earlier runs are now in ", aside.string()));
  return absl::OkStatus();
}

// A folder without a complete checkpoint is a start anew only if none was ever complete: one that
// has a manifest and is damaged now must not be passed over for fresh weights.
absl::Status CheckNoneDamaged(const std::string& dir) {
  ZS_ASSIGN_OR_RETURN(const std::vector<CheckpointSummary> all, ListCheckpoints(dir));
  for (const CheckpointSummary& one : all) {
    std::error_code error;
    if (one.complete || !fs::exists(one.path + "/manifest.json", error)) continue;
    return absl::DataLossError(absl::StrCat(one.path, " was complete and is damaged: ", one.problem,
                                            "; bring the file back, go on from another checkpoint "
                                            "with --resume-from DIR, or start anew "
                                            "with --fresh"));
  }
  return absl::OkStatus();
}

}  // namespace

void AddResumeOptions(CLI::App* command, ResumeOptions* options) {
  command
      ->add_option("--resume-from", options->from,
                   "Goes on from a checkpoint: its folder, a folder of checkpoints, or latest, the "
                   "newest of checkpoint.dir")
      ->type_name("DIR|latest");
  command->add_flag(
      "--weights-only", options->weights_only,
      "Takes only the weights of --resume-from: steps, data and optimizer start anew");
}

absl::StatusOr<v1::SubmitRequest> MakeRequest(const v1::JobSpec& spec,
                                              const ResumeOptions& options) {
  v1::SubmitRequest request;
  *request.mutable_spec() = spec;
  if (options.from.empty()) {
    if (!options.weights_only) return request;
    return absl::InvalidArgumentError(
        "--weights-only says how much to take from a checkpoint; name it with --resume-from DIR");
  }
  std::error_code error;
  request.set_resume_from(options.from == "latest"
                              ? options.from
                              : fs::absolute(options.from, error).lexically_normal().string());
  if (error) return absl::InternalError(absl::StrCat(options.from, ": ", error.message()));
  request.set_weights_only(options.weights_only);
  return request;
}

absl::StatusOr<v1::SubmitRequest> MakeLocalRequest(const v1::JobSpec& spec,
                                                   const ResumeOptions& options,
                                                   const Notice& notice) {
  if (options.fresh && !options.from.empty()) {
    return absl::InvalidArgumentError(
        "--fresh starts anew and --resume-from goes on: give one of them");
  }
  ZS_ASSIGN_OR_RETURN(v1::SubmitRequest request, MakeRequest(spec, options));
  if (!spec.has_checkpoint()) return request;
  const std::string& dir = spec.checkpoint().dir();
  if (options.fresh) {
    ZS_RETURN_IF_ERROR(MoveAside(spec.name(), dir, notice));
    return request;
  }
  std::error_code error;
  if (!options.from.empty() || !fs::exists(dir, error)) return request;
  if (!fs::is_directory(dir, error)) {
    return absl::InvalidArgumentError(
        absl::StrCat("checkpoint.dir: ", dir,
                     " is no folder; name one, or a new one, with --set "
                     "checkpoint.dir=DIR"));
  }
  const absl::StatusOr<FoundCheckpoint> found = FindCheckpoint(dir);
  if (absl::IsNotFound(found.status())) {
    ZS_RETURN_IF_ERROR(CheckNoneDamaged(dir));
    notice(absl::StrCat("starting anew: ", found.status().message()));
    return request;
  }
  ZS_RETURN_IF_ERROR(found.status());
  // Another job's, in a folder that both name, is the owner's to refuse.
  if (found->manifest.job != spec.name()) return request;
  if (found->manifest.step >= spec.steps()) {
    return absl::AlreadyExistsError(absl::StrCat(
        "job ", spec.name(), " is complete: step ", found->manifest.step, " of ", spec.steps(),
        " is in ", found->path, "; train on with --set steps=N, anew with --fresh"));
  }
  request.set_resume_from("latest");
  for (const std::string& skipped : found->skipped) notice(absl::StrCat("not used: ", skipped));
  notice(absl::StrCat("going on from ", found->path, "; --fresh starts anew"));
  return request;
}

}  // namespace zeroshard
