#include "client/watch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/render.h"
#include "common/exit_codes.h"

namespace zeroshard {

absl::StatusOr<v1::JobStatus> FollowJob(JobsClient* client, const std::string& job,
                                        absl::Duration patience, const Clock* clock,
                                        StopToken* stop, const WatchSink& sink) {
  constexpr absl::Duration kShortestPause = absl::Milliseconds(100);
  constexpr absl::Duration kLongestPause = absl::Seconds(2);
  std::string name = job;
  uint64_t seen_step = 0;
  v1::JobStatus last;
  absl::Duration heard = clock->Now();
  absl::Duration pause = kShortestPause;
  while (true) {
    absl::Status status = client->Watch(name, seen_step, stop, [&](const v1::WatchUpdate& message) {
      heard = clock->Now();
      pause = kShortestPause;
      v1::WatchUpdate update = message;
      auto* records = update.mutable_records();
      records->erase(std::remove_if(records->begin(), records->end(),
                                    [&](const v1::StepRecord& record) {
                                      if (record.step() <= seen_step) return true;
                                      seen_step = record.step();
                                      return false;
                                    }),
                     records->end());
      last = update.status();
      // From now on this run, whatever else gets its name.
      if (!last.run_id().empty()) name = last.run_id();
      sink.on_update(update);
    });
    if (stop->stopped()) return absl::CancelledError("stopped");
    if (HasEnded(last.state())) return last;
    // A coordinator that ends hangs up in either way.
    if (status.ok() || absl::IsCancelled(status)) {
      status = absl::UnavailableError("the coordinator is shutting down");
    }
    if (!absl::IsUnavailable(status)) return status;
    if (clock->Now() - heard > patience) return status;
    if (sink.on_away) sink.on_away(std::string(status.message()));
    if (stop->SleepFor(pause)) return absl::CancelledError("stopped");
    pause = std::min(pause * 2, kLongestPause);
  }
}

WatchSink JobView::Sink() {
  const auto measure = [this](const v1::WatchUpdate& update) {
    for (const v1::StepRecord& record : update.records()) meter_.Add(record);
  };
  if (json_) {
    return {[this, measure](const v1::WatchUpdate& update) {
              measure(update);
              console_->Print(JsonLine(ToJson(update)));
            },
            {}};
  }
  return {[this, measure](const v1::WatchUpdate& update) {
            measure(update);
            progress_.Update(update);
          },
          [this](const std::string& reason) { progress_.Away(reason); }};
}

int JobView::Finish(const v1::JobStatus& status, std::ostream* err) {
  const std::string state = FormatState(status);
  if (status.state() != v1::JOB_STATE_COMPLETED) {
    console_->EndLive();
    PrintError(err, state);
    return kExitFailed;
  }
  if (json_) return kExitOk;
  console_->Print(state);
  if (status.has_first() && status.has_last()) {
    std::string line =
        absl::StrFormat("loss %.4f at step %d, %.4f at step %d", status.first().loss(),
                        status.first().step(), status.last().loss(), status.last().step());
    if (meter_.steps_seen() > 0) {
      absl::StrAppend(&line, ", ", FormatCount(meter_.TokensPerSecond()), " tokens/s");
    }
    console_->Print(line);
  }
  return kExitOk;
}

}  // namespace zeroshard
