// How far a job is, as people want to read it.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "client/console.h"
#include "common/clock.h"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard {

// Speed and time left from the steps seen so far. Not thread-safe.
class ProgressMeter {
 public:
  void Add(const v1::StepRecord& record);

  uint64_t steps_seen() const { return steps_seen_; }
  // Over everything seen; 0 when nothing was.
  double TokensPerSecond() const;
  // Over the last twenty steps.
  double RecentTokensPerSecond() const;
  double SecondsPerStep() const;

 private:
  std::deque<v1::StepRecord> recent_;
  uint64_t steps_seen_ = 0;
  double tokens_ = 0;
  double seconds_ = 0;
};

// "step 120/300  loss 3.1415  eval 3.2011  41,234 tokens/s  12 s left"; `eval`: the newest loss of
// the validation set, if there was any. At its end "  3 steps lost", where the job went back.
std::string FormatProgress(const v1::JobStatus& status, const v1::StepRecord& last,
                           std::optional<double> eval, const ProgressMeter& meter);

// Shows a job's updates until it ends: changes of state as lines that stay; steps as a live line on
// a terminal, and elsewhere as a line every five seconds and one at the end. Not thread-safe.
class ProgressView {
 public:
  // The meter has been told of an update's steps before Update is called.
  ProgressView(Console* console, const Clock* clock, const ProgressMeter* meter)
      : console_(console), clock_(clock), meter_(meter) {}

  void Update(const v1::WatchUpdate& update);
  // The coordinator does not answer for now.
  void Away(const std::string& reason);

 private:
  void ShowState(const v1::JobStatus& status);
  void ShowSteps(const v1::JobStatus& status);
  void ShowEvents(const v1::JobStatus& status);

  Console* const console_;
  const Clock* const clock_;
  const ProgressMeter* const meter_;
  v1::StepRecord last_;
  std::optional<double> eval_;
  std::string shown_state_;
  v1::JobEvent last_event_;  // without a time: none yet
  bool away_ = false;
  bool printed_any_ = false;
  uint64_t printed_step_ = 0;
  absl::Duration printed_at_;
};

}  // namespace zeroshard
