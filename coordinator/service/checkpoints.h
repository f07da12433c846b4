// What a submission wants of checkpoints, looked up on the disk. These functions may hang with the
// file system that they look at. Thread-safe.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/core/events.h"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard::coordinator {

// Makes `dir`, an absolute path, and writes a file into it that goes again. Errors name path and
// reason.
absl::Status ProbeCheckpointFolder(const std::string& dir);

// What SubmitRequest.resume_from and weights_only say about a job of `spec`, which is normalised;
// nothing for a fresh start. Probes checkpoint.dir where the job has one.
//   INVALID_ARGUMENT: no checkpoint section for `latest`, a relative path, another model (naming
//     the first difference), no step left to train.
//   NOT_FOUND: no complete checkpoint; the message lists what there is and why it is none.
//   FAILED_PRECONDITION: a fresh start, or one from weights alone, into a folder that holds
//   complete
//     checkpoints.
absl::StatusOr<std::optional<Checkpoint>> FindStart(const v1::JobSpec& spec,
                                                    const std::string& resume_from,
                                                    bool weights_only);

// What FindNewest asks for; nothing where the run has none there, also where there is no folder:
// `instead` then gets what is there and why it is none.
absl::StatusOr<std::optional<Checkpoint>> FindNewestOf(const FindNewest& request,
                                                       std::vector<std::string>* instead);

// INVALID_ARGUMENT names the first difference between the model of a job and that of a checkpoint
// that changes a tensor or the arithmetic.
absl::Status CompareModels(const v1::ModelSpec& job, const v1::ModelSpec& checkpoint);

// What is in a folder of checkpoints; a folder that is not there holds none.
absl::StatusOr<v1::CheckpointsResponse> DescribeCheckpoints(const std::string& dir);

}  // namespace zeroshard::coordinator
