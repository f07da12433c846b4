// The coordinator's unary calls, as a member of a running job makes them: while the coordinator is
// away they wait and try again, with jittered backoff, until their deadline.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/member/cancellation.h"
#include "zeroshard/v1/cluster.grpc.pb.h"

namespace zeroshard {

// Thread-safe. Each method returns when the coordinator answered, when `timeout` (which may be
// InfiniteDuration) has passed, or when `cancellation` (may be null) was cancelled. Errors:
//   DEADLINE_EXCEEDED    the coordinator's own words, or that it did not answer, and the last
//   error; FAILED_PRECONDITION  the fence is stale: this member no longer belongs to that
//   generation; ABORTED              the generation ended while waiting; otherwise the
//   cancellation's status; others               as the coordinator gave them.
class ClusterClient {
 public:
  explicit ClusterClient(const std::string& address);

  absl::Status PutKey(const v1::Fence& fence, const std::string& key, const std::string& value,
                      absl::Duration timeout, Cancellation* cancellation);
  absl::StatusOr<std::string> GetKey(const v1::Fence& fence, const std::string& key,
                                     absl::Duration timeout, Cancellation* cancellation);
  // A wait for other members, and theirs is the time that counts: `timeout` begins anew when the
  // coordinator, having been away, answers again. While it is away only `cancellation` ends this.
  absl::Status Barrier(const v1::Fence& fence, const std::string& name, absl::Duration timeout,
                       Cancellation* cancellation);
  absl::Status ReportSteps(const v1::ReportStepsRequest& request, absl::Duration timeout,
                           Cancellation* cancellation);
  // A wait for the stores, which the coordinator bounds and whose end it explains. Time in which it
  // is away does not count.
  absl::StatusOr<v1::StepDecision> CommitStep(const v1::CommitStepRequest& request,
                                              absl::Duration timeout, Cancellation* cancellation);
  absl::Status ReportEnd(const v1::ReportEndRequest& request, absl::Duration timeout,
                         Cancellation* cancellation);

 private:
  const std::string address_;
  std::unique_ptr<v1::Cluster::Stub> stub_;
};

}  // namespace zeroshard
