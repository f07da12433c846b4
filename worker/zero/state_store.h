// Where an offloaded job's state lives, as the engine of one rank sees it: gradients out, updated
// parameters in. Implemented over gRPC by worker/agent, and within the process by tests.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/types.h"
#include "worker/device/device.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard {

// Bytes of payload so far. Any thread may read.
struct OffloadCounters {
  std::atomic<uint64_t> pushed{0};  // every replica counted
  std::atomic<uint64_t> pulled{0};
  // Of them, those that went through memory shared with a store of this host.
  std::atomic<uint64_t> pushed_shared{0};
  std::atomic<uint64_t> pulled_shared{0};
};

// Thread-safe. Errors, in the events too:
//   FAILED_PRECONDITION  this generation is over
//   ABORTED              Abort was called, or the generation ended
//   UNAVAILABLE          a store is gone
//   DEADLINE_EXCEEDED    nothing moved for a collective's time
// each with store, chunk, step. After an error the object is of no further use. When an event is
// done, with whatever status, the caller's memory is no longer touched. An event that `after` a
// failed one would have started has that one's error.
class StateStore {
 public:
  virtual ~StateStore() = default;

  // The version that the job starts from: of Assign.
  virtual v1::StateVersion base() const = 0;

  // The final sum of elements [begin, end) of a unit's flat vector, in the wire type, for `step`.
  // `data` stays as it is until the event is done: every replica has acknowledged it then. Starts
  // after `after`.
  virtual Event Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
                     const Event& after = {}) = 0;

  // Elements [begin, end) of the parameters after `step`, in the compute type, into `out`, which is
  // not touched before `after` is done. Waits until the stores have that version. Frozen units: of
  // any version.
  virtual Event Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out,
                     const Event& after = {}) = 0;

  // Rank 0 alone, when every rank's pushes of the step are done: the step becomes durable.
  // `next_sample`: position in the run's order of the next step's first one; `samples`: that the
  // training set has.
  virtual absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record,
                                                  uint64_t next_sample, uint64_t samples) = 0;

  virtual void Abort(const std::string& reason) = 0;
  virtual const OffloadCounters& counters() const = 0;
};

}  // namespace zeroshard
