// A job specification from the user's file to what is submitted.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

struct LoadedJob {
  v1::JobSpec spec;
  std::vector<std::string> warnings;  // a line each
};

// Reads, overrides, fills in (also from model.init_from's config.json) and checks. `path` "-" reads
// standard input. Relative paths become absolute, because workers run elsewhere: they are relative
// to the job file's folder (standard input: to the current one), checkpoint.dir to
// `checkpoint_base` where that is given, in a folder of the job's name. NOT_FOUND, INVALID_ARGUMENT
// and RESOURCE_EXHAUSTED name file, line and key.
absl::StatusOr<LoadedJob> LoadJobFile(const std::string& path,
                                      const std::vector<std::string>& overrides,
                                      const std::string& checkpoint_base = "");

// NOT_FOUND names the first path of the job's data, tokenizer or model that this machine does not
// have or cannot read.
absl::Status CheckFilesHere(const v1::JobSpec& spec);

}  // namespace zeroshard
