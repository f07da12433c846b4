// What a specification says of state in the shard stores: zero_optimization.offload_optimizer,
// .offload_param and the section `store`.
#pragma once

#include "absl/status/status.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// Fills in and checks. INVALID_ARGUMENT names the key, the value seen and the value wanted. The
// model and the stage have been checked before.
absl::Status NormaliseOffload(v1::JobSpec* spec);

}  // namespace zeroshard
