// What a job goes on from, as the user says it or as the folder of an earlier run has it.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard {

struct ResumeOptions {
  std::string from;  // a folder, or latest; empty: not asked for
  bool weights_only = false;
  bool fresh = false;  // zeroshard local: earlier checkpoints go to a folder beside them
};

// --resume-from and --weights-only.
void AddResumeOptions(CLI::App* command, ResumeOptions* options);

// The request to train `spec`, the folder made absolute. INVALID_ARGUMENT: --weights-only alone.
absl::StatusOr<v1::SubmitRequest> MakeRequest(const v1::JobSpec& spec,
                                              const ResumeOptions& options);

// The same for zeroshard local, which sees the checkpoint folder: where it holds complete
// checkpoints of the job, the job goes on from the newest. ALREADY_EXISTS: that one is at the job's
// last step, so that there is nothing left to do; FAILED_PRECONDITION: --fresh of a folder that a
// running job holds; DATA_LOSS: the only ones there are damaged. `notice` is told what was found.
absl::StatusOr<v1::SubmitRequest> MakeLocalRequest(
    const v1::JobSpec& spec, const ResumeOptions& options,
    const std::function<void(const std::string&)>& notice);

}  // namespace zeroshard
