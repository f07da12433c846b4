// What a job's `timeouts` section allows, and what follows from it: stores and coordinator wait for
// each other, so that who is to speak first must know when the other loses patience. Pure.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard {

inline constexpr uint32_t kStartSeconds = 120, kStepSeconds = 600, kCollectiveSeconds = 300;

inline absl::Duration StartTimeout(const v1::JobSpec& spec) {
  const uint32_t given = spec.timeouts().start_seconds();
  return absl::Seconds(given != 0 ? given : kStartSeconds);
}
inline absl::Duration StepTimeout(const v1::JobSpec& spec) {
  const uint32_t given = spec.timeouts().step_seconds();
  return absl::Seconds(given != 0 ? given : kStepSeconds);
}
inline absl::Duration CollectiveTimeout(const v1::JobSpec& spec) {
  const uint32_t given = spec.timeouts().collective_seconds();
  return absl::Seconds(given != 0 ? given : kCollectiveSeconds);
}

// How long a job that is cancelled with a checkpoint has for the step under way and the collectives
// that end it. Writing takes as long as it advances: each part that is written starts this anew.
inline absl::Duration SaveTimeout(const v1::JobSpec& spec) {
  return StepTimeout(spec) + CollectiveTimeout(spec);
}

// A checkpoint of which the stores write nothing for so long is given up by the coordinator, also
// where the job waits for it with its SaveTimeout, which is longer.
inline absl::Duration SnapshotTimeout(const v1::JobSpec& spec) { return CollectiveTimeout(spec); }

// How long a store lets a snapshot, and the steps behind it, wait for memory that others have: it
// says so well before the coordinator, which knows nothing of them, gives up the one or the store.
inline absl::Duration WriterPatience(const v1::JobSpec& spec) {
  return std::min(SnapshotTimeout(spec), StepTimeout(spec)) / 2;
}

}  // namespace zeroshard
