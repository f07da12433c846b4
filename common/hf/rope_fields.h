// The fields of a config.json about rotary positions.
#pragma once

#include <string>
#include <vector>

#include "common/hf/json.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// Sets rope_theta and, unless positions are not stretched, rope_scaling. There are two layouts:
// rope_theta beside rope_scaling (whose kind is `rope_type`, or `type` in older files), and the
// newer rope_parameters that holds both. Where a file has both they must agree. Kinds: default,
// linear, llama3; the others are refused by name.
void ReadRope(JsonFields* fields, std::vector<std::string>* warnings, v1::ModelSpec* model);

}  // namespace zeroshard
