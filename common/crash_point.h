// Points at which a process kills itself, for tests of what a crash there leaves behind. Off unless
// the environment asks for one:
//
//   ZEROSHARD_CRASH_AT=NAME[@RANK]:STEP[:FILE]
//
// At the point NAME of step STEP the process sends itself SIGKILL: nothing is flushed, closed or
// said. With FILE only whoever creates that file does: of several processes with the same
// environment one dies, and what is started again in its place does not die again. That the file is
// there says that the point was reached. RANK is that of a worker in its job; without it any will
// do. The variable is read once, at the first point; one that cannot be read is an error in the
// log, and nothing else.
//
// The points and where they are (tests/faults/crash_points_test.cc goes through all of them):
//   worker.before_push        nothing of the step was pushed by this rank
//   worker.mid_push           its first piece was acknowledged by all replicas, the rest was not
//   worker.before_commit      everything of all ranks is acknowledged, and CommitStep not called
//   worker.before_pull        rank 0 has its answer; nothing of the new version was asked for
//   worker.after_pull         the first piece of the new version is here
//   coordinator.before_log    the step is decided, in memory alone
//   coordinator.after_log     it is in the durable log, and nobody was told
//   coordinator.after_answer  rank 0 was told, and no store
//   coordinator.mid_tell      rank 0 and one store were told, and no other
//   store.before_sealed       all gradients are here; the coordinator does not know
//   store.after_sealed        it was told; a decision is not acted upon
//   store.before_apply        the decision is here, no chunk was begun
//   store.mid_apply           one chunk is at the new version, and given to who waits for it; the
//                             other chunks are not
//   store.before_applied      all chunks are at the new version; the coordinator does not know
//   store.after_applied       it was told
// A store that holds a single trained chunk of a job never is at store.mid_apply.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace zeroshard {

inline constexpr uint32_t kAnyRank = std::numeric_limits<uint32_t>::max();

// What was given to other threads of this process to send gets out within this, as a rule.
inline constexpr absl::Duration kCrashLinger = absl::Milliseconds(150);

namespace crash_point {
extern std::atomic<bool> armed;  // until the environment turns out not to ask for anything
void Reach(absl::string_view name, uint64_t step, uint32_t rank, absl::Duration linger);
}  // namespace crash_point

// Costs a relaxed load where no point is asked for. Where it is this one: lets the process's other
// threads go on for `linger`, except those that come to any point meanwhile, which stay there; then
// does not return. Thread-safe.
inline void CrashPoint(absl::string_view name, uint64_t step, uint32_t rank = kAnyRank,
                       absl::Duration linger = absl::ZeroDuration()) {
  if (crash_point::armed.load(std::memory_order_relaxed)) {
    crash_point::Reach(name, step, rank, linger);
  }
}

}  // namespace zeroshard
