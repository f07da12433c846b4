// Whether an assignment makes sense, and fits this host. Pure but for the files that are named.
#pragma once

#include "absl/status/status.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard {

// INVALID_ARGUMENT: a rank that the world does not have, a first step that does not go with the
// checkpoint, no timeouts.
absl::Status CheckAssignment(const v1::Assign& assign);

// Where the weights come from model.init_from: that this host's config.json there says what the
// specification says, which was filled in on another. INVALID_ARGUMENT names the differences.
absl::Status CheckInitFrom(const v1::Assign& assign, const std::string& host);

}  // namespace zeroshard
