// One status for all ranks, where each of them did a part of something that only counts whole.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// Bytes of a message that travel; the rest is cut off.
constexpr size_t kAgreedMessageBytes = 1012;

// How long one collective of this job may take.
absl::Duration CollectiveDeadline(const v1::JobSpec& spec);

// Collective: OK where `own` is OK on every rank; else the status of the first rank where it is
// not, with that rank's number in front of the message (not at world size 1) and as the blamed
// rank. `what` names the exchange in a collective's own errors.
absl::Status Agree(Communicator* comm, const absl::Status& own, const std::string& what);

}  // namespace zeroshard
