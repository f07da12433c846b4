// A job specification from the user's file to what is submitted.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// Reads, overrides, fills in and checks. `path` "-" reads standard input. Relative data paths
// become absolute: they are relative to the job file's folder (standard input: to
// the current one), because workers run elsewhere. NOT_FOUND, INVALID_ARGUMENT and
// RESOURCE_EXHAUSTED name file, line and key.
absl::StatusOr<v1::JobSpec> LoadJobFile(const std::string& path,
                                        const std::vector<std::string>& overrides);

// NOT_FOUND names the first of data.train that this machine does not have or cannot read.
absl::Status CheckDataHere(const v1::JobSpec& spec);

}  // namespace zeroshard
