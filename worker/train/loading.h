// Reading that each rank does by itself for as long as it takes: one that reads more than the
// others, or from a slower disk, must not cost them a collective's deadline.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/parameter_source.h"
#include "worker/comm/communicator.h"

namespace zeroshard {

// Between a task and whoever waits for it. Thread-safe.
struct LoadSignals {
  std::atomic<uint64_t> bytes{0};  // read so far: grows while the task gets anywhere
  std::atomic<bool> stop{false};   // it ends soon then, with CANCELLED
};

// Each is run once, on a thread of its own. An exception is an error.
using LoadTask = std::function<absl::Status(LoadSignals*)>;

// Collective. Runs this rank's tasks beside each other; until all ranks are through, they tell each
// other how far they are in exchanges far shorter than `deadline`, which is a collective's. OK
// where every task of every rank is; else the same error on all ranks, that of the first rank's
// first task that failed (as Agree says), and tasks that still run are stopped. DEADLINE_EXCEEDED:
// nothing was read anywhere for `deadline`; names the ranks that are not through. CANCELLED once
// `stop` (may be null) is true. Returns when this rank's tasks have, for they use what is the
// caller's: a rank whose disk hangs comes back with its disk, while the others go on.
absl::Status LoadTogether(Communicator* comm, absl::Duration deadline,
                          const std::atomic<bool>* stop, const std::string& what,
                          const std::vector<LoadTask>& tasks);

// Reads through another source, and counts and stops as `signals` say; both outlive it.
class SignallingSource : public ParameterSource {
 public:
  SignallingSource(const ParameterSource* source, LoadSignals* signals)
      : source_(*source), signals_(*signals) {}
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override;
  void DropPages() const override { source_.DropPages(); }

 private:
  const ParameterSource& source_;
  LoadSignals& signals_;
};

}  // namespace zeroshard
