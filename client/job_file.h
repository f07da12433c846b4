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

struct LoadJobOptions {
  std::vector<std::string> overrides;  // KEY.PATH=VALUE
  // Where a relative checkpoint.dir lies, in a folder of the job's name; empty: beside the job
  // file.
  std::string checkpoint_base;
  // What the job may go on from: a folder, or latest, what checkpoint.dir has; empty: nothing.
  std::string resume_from;
};

// Reads, overrides, fills in and checks. `path` "-" reads standard input. Relative paths become
// absolute, because workers run elsewhere: they are relative to the job file's folder (standard
// input: to the current one). A model that is named by model.init_from is filled in from that
// folder's config.json or, where the folder is gone, from the checkpoint that the job goes on from.
// NOT_FOUND, INVALID_ARGUMENT and RESOURCE_EXHAUSTED name file, line and key.
absl::StatusOr<LoadedJob> LoadJobFile(const std::string& path, const LoadJobOptions& options);

// NOT_FOUND names the first path of the job's data, tokenizer or model that this machine does not
// have or cannot read.
absl::Status CheckFilesHere(const v1::JobSpec& spec);

}  // namespace zeroshard
