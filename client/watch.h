// Following a job to its end, through absences of the coordinator.
#pragma once

#include <functional>
#include <ostream>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/command.h"
#include "client/console.h"
#include "client/jobs_client.h"
#include "client/progress.h"
#include "common/clock.h"

namespace zeroshard {

struct WatchSink {
  std::function<void(const v1::WatchUpdate&)> on_update;   // each step once, in order
  std::function<void(const std::string& reason)> on_away;  // before each pause
};

// Returns the job's status once it has ended. Connects again, with pauses that grow to two seconds,
// for up to `patience` without a word from the coordinator, and then returns UNAVAILABLE.
// CANCELLED: `stop` was stopped. Other errors are the coordinator's.
absl::StatusOr<v1::JobStatus> FollowJob(JobsClient* client, const std::string& job,
                                        absl::Duration patience, const Clock* clock,
                                        StopToken* stop, const WatchSink& sink);

// Shows a job to its end on the console, as text or as one JSON object an update.
class JobView {
 public:
  JobView(Console* console, const Clock* clock, bool json)
      : console_(console), progress_(console, clock, &meter_), json_(json) {}

  WatchSink Sink();
  // The last words on a job that has ended: on the console how it went and how fast, on `err` why
  // it did not complete. Returns the exit code: 0 only if it completed.
  int Finish(const v1::JobStatus& status, std::ostream* err);

  const ProgressMeter& meter() const { return meter_; }

 private:
  Console* const console_;
  ProgressMeter meter_;
  ProgressView progress_;
  const bool json_;
};

}  // namespace zeroshard
