#include "client/job_file.h"

#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/files.h"
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

}  // namespace

absl::StatusOr<v1::JobSpec> LoadJobFile(const std::string& path,
                                        const std::vector<std::string>& overrides) {
  ZS_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  const std::string source = path == "-" ? "standard input" : path;
  ZS_ASSIGN_OR_RETURN(v1::JobSpec spec, ParseJobSpec(text, source, overrides));
  if (absl::Status status = NormaliseJobSpec(&spec); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat(source, ": ", status.message()));
  }
  std::error_code error;
  const fs::path folder =
      path == "-" ? fs::current_path(error) : fs::absolute(path, error).parent_path();
  if (error) return absl::InternalError(absl::StrCat(source, ": ", error.message()));
  for (std::string& train : *spec.mutable_data()->mutable_train()) train = Resolve(folder, train);
  return spec;
}

absl::Status CheckDataHere(const v1::JobSpec& spec) {
  for (int i = 0; i < spec.data().train_size(); ++i) {
    const std::string& path = spec.data().train(i);
    if (access(path.c_str(), R_OK) == 0) continue;
    return absl::NotFoundError(absl::StrCat(
        "data.train.", i, ": ", absl::StrCat(ErrnoError(errno, "read", path).message()),
        "; correct the path, or name another with --set data.train=[PATH]"));
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
