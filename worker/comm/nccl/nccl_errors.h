// How errors of NCCL are worded and classed.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "worker/comm/nccl/nccl_api.h"

namespace zeroshard {

// UNAVAILABLE for what a peer or the network did, FAILED_PRECONDITION for a set-up that NCCL
// refuses, INTERNAL for the rest. `call` is what was called or asked.
absl::Status NcclError(NcclApi* api, NcclResult result, NcclComm* comm, const std::string& call);

// `status` with `what` in front, about the same rank and value.
absl::Status Prefixed(const std::string& what, const absl::Status& status);

}  // namespace zeroshard
