// Whether an assignment makes sense, and fits this host. Pure but for the files that are named.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "common/plan/rank_mesh.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard {

// INVALID_ARGUMENT: a rank that the world does not have, a mesh that is not the world's or not the
// specification's, a first step that does not go with the
// checkpoint (of an offloaded job: with the stores' version), no stores where they are needed, no
// timeouts.
absl::Status CheckAssignment(const v1::Assign& assign);

// Of a valid assignment; none given is a data line alone.
MeshShape ShapeOf(const v1::Assign& assign);
// KeyValueCopies of the job's model; 1 where it has none.
int CopiesOf(const v1::Assign& assign);
// ", pipeline 1 of 2, data 0 of 2, tensor 1 of 2"; empty without a mesh.
std::string PlaceInMesh(const v1::Assign& assign);

// Where the weights come from model.init_from: that this host's config.json there says what the
// specification says, which was filled in on another. INVALID_ARGUMENT names the differences. The
// stores read the weights of an offloaded job, and its ranks need not see the folder.
absl::Status CheckInitFrom(const v1::Assign& assign, const std::string& host);

}  // namespace zeroshard
