// What every communicator checks before an operation, and how it names one. INVALID_ARGUMENT says
// which argument is wrong, what it is and what was expected.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "common/types.h"
#include "worker/comm/communicator.h"

namespace zeroshard {

absl::Status CheckSum(DType type);  // fp32, bf16 or fp16
absl::Status CheckCount(const char* what, int64_t count);
absl::Status CheckArgs(const ReduceScatterArgs& args, int size);
absl::Status CheckRoot(int root, int size);
// Of a send or receive between `rank` and `peer`.
absl::Status CheckMessage(int64_t bytes, int peer, int rank, int size);

// "all_gather of blocks.3 (step 7, backward) on rank 1 of 4".
std::string OperationName(const char* name, const CollectiveInfo& info, int rank, int size);

// `status` with `what` in front, about the same rank and value.
absl::Status Prefixed(const std::string& what, const absl::Status& status);

}  // namespace zeroshard
