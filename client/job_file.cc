#include "client/job_file.h"

#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/reader.h"
#include "common/files.h"
#include "common/hf/config.h"
#include "common/plan/planner.h"
#include "common/spec/job_spec.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxBytes = (1 << 20) + 1;  // one more than a specification may have

absl::StatusOr<std::string> ReadText(const std::string& path) {
  if (path == "-") {
    std::string text;
    for (std::istreambuf_iterator<char> at(std::cin), end; at != end && text.size() < kMaxBytes;
         ++at) {
      text += *at;
    }
    return text;
  }
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    return absl::NotFoundError(absl::StrCat(path,
                                            ": no such file; name a job specification, for "
                                            "example deploy/jobs/licences.yaml"));
  }
  if (!fs::is_regular_file(path, ignored)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a file; name a job specification"));
  }
  return ReadFile(path, kMaxBytes);
}

std::string Resolve(const fs::path& folder, const std::string& path) {
  return (folder / path).lexically_normal().string();
}

// The paths of a specification as it was read: those that are empty are wanted elsewhere.
void ResolvePaths(const fs::path& folder, const std::string& checkpoint_base, v1::JobSpec* spec) {
  for (auto* list : {spec->mutable_data()->mutable_train(), spec->mutable_eval()->mutable_data()}) {
    for (std::string& path : *list) {
      if (!path.empty()) path = Resolve(folder, path);
    }
  }
  if (spec->eval().ByteSizeLong() == 0) spec->clear_eval();
  std::string* tokenizer = spec->mutable_data()->mutable_tokenizer();
  if (IsTokenizerPath(*tokenizer)) *tokenizer = Resolve(folder, *tokenizer);
  std::string* model = spec->mutable_model()->mutable_init_from();
  if (!model->empty()) *model = Resolve(folder, *model);
  if (!spec->has_checkpoint() || spec->checkpoint().dir().empty()) return;
  std::string* dir = spec->mutable_checkpoint()->mutable_dir();
  if (!checkpoint_base.empty() && fs::path(*dir).is_relative()) {
    *dir = Resolve(checkpoint_base, absl::StrCat(*dir, "/", spec->name()));
  } else {
    *dir = Resolve(folder, *dir);
  }
}

// `set`: how the key is overridden.
absl::Status CheckHere(absl::string_view key, absl::string_view set, const std::string& path) {
  if (access(path.c_str(), R_OK) == 0) return absl::OkStatus();
  const int error = errno;
  // Megatron's files may be named by what their names share.
  if (access((path + ".bin").c_str(), R_OK) == 0) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(key, ": ",
                                          absl::StrCat(ErrnoError(error, "read", path).message()),
                                          "; correct the path, or name another with --set ", set));
}

// The model of the checkpoint that the job goes on from, with what the file says beside it. False
// where there is no such checkpoint here.
bool FillModelFromCheckpoint(const std::string& resume_from, v1::JobSpec* spec) {
  const absl::StatusOr<FoundCheckpoint> found =
      FindCheckpoint(resume_from == "latest" ? spec->checkpoint().dir() : resume_from);
  if (!found.ok()) return false;
  v1::ModelSpec model = found->manifest.spec.model();
  // What is the file's to say, also by saying nothing.
  model.clear_trainable();
  model.clear_embd_pdrop();
  model.clear_attn_pdrop();
  model.clear_resid_pdrop();
  model.MergeFrom(spec->model());
  *spec->mutable_model() = model;
  return true;
}

// Fills model.init_from in.
absl::StatusOr<std::vector<std::string>> ResolveModel(const std::string& resume_from,
                                                      v1::JobSpec* spec) {
  const std::string& folder = spec->model().init_from();
  std::error_code ignored;
  if (!folder.empty() && !resume_from.empty() && !fs::exists(folder, ignored) &&
      FillModelFromCheckpoint(resume_from, spec)) {
    return std::vector<std::string>{
        absl::StrCat("model.init_from: ", folder, " is not here; the model is the checkpoint's")};
  }
  return ResolveInitFrom(spec);
}

}  // namespace

absl::StatusOr<LoadedJob> LoadJobFile(const std::string& path, const LoadJobOptions& options) {
  ZS_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  const std::string source = path == "-" ? "standard input" : path;
  LoadedJob job;
  ZS_ASSIGN_OR_RETURN(job.spec, ParseJobSpec(text, source, options.overrides));
  std::error_code error;
  const fs::path folder =
      path == "-" ? fs::current_path(error) : fs::absolute(path, error).parent_path();
  if (error) return absl::InternalError(absl::StrCat(source, ": ", error.message()));
  ResolvePaths(folder, options.checkpoint_base, &job.spec);
  const auto in_source = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(source, ": ", status.message()));
  };
  absl::StatusOr<std::vector<std::string>> warnings = ResolveModel(options.resume_from, &job.spec);
  if (!warnings.ok()) return in_source(warnings.status());
  job.warnings = *std::move(warnings);
  if (absl::Status status = NormaliseJobSpec(&job.spec); !status.ok()) return in_source(status);
  if (std::string note = NoteOnLiveParameters(job.spec); !note.empty()) {
    job.warnings.push_back(std::move(note));
  }
  return job;
}

absl::Status CheckFilesHere(const v1::JobSpec& spec) {
  for (int i = 0; i < spec.data().train_size(); ++i) {
    ZS_RETURN_IF_ERROR(
        CheckHere(absl::StrCat("data.train.", i), "data.train=[PATH]", spec.data().train(i)));
  }
  for (int i = 0; i < spec.eval().data_size(); ++i) {
    ZS_RETURN_IF_ERROR(
        CheckHere(absl::StrCat("eval.data.", i), "eval.data=[PATH]", spec.eval().data(i)));
  }
  const std::string& tokenizer = spec.data().tokenizer();
  if (IsTokenizerPath(tokenizer)) {
    ZS_RETURN_IF_ERROR(CheckHere("data.tokenizer", "data.tokenizer=PATH", tokenizer));
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
