// Steps of offloaded jobs.
#include "coordinator/core/core.h"

namespace zeroshard::coordinator {

void Core::On(const CommitStep& event, const Moment&, Decision* out) {
  out->actions.push_back(
      Reply{event.request, absl::FailedPreconditionError("not an offloaded job"), "", 0});
}
void Core::On(const SnapshotsOpened&, const Moment&, Decision*) {}
void Core::On(const SnapshotBegun&, const Moment&, Decision*) {}
void Core::On(const SnapshotCompleted&, const Moment&, Decision*) {}

}  // namespace zeroshard::coordinator
