// A job "a" of two workers whose state is on its ranks, and what becomes of it when one is lost.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {

inline const std::vector<std::string> kBoth = {"worker-0", "worker-1"};

inline std::vector<uint64_t> UpTo(uint64_t last) {
  std::vector<uint64_t> steps;
  for (uint64_t step = 1; step <= last; ++step) steps.push_back(step);
  return steps;
}

inline std::string Events(const Harness& h) {
  const v1::JobStatus status = h.Status("a");
  std::string text;
  for (const v1::JobEvent& event : status.events()) {
    absl::StrAppend(&text, event.reason(), "\n");
  }
  return text;
}

// Two workers, and job "a" at step `step`.
inline void Start(Harness& h, uint64_t step, uint64_t steps = 100) {
  h.JoinMany(2);
  h.StartJob(Harness::SavingSpec("a", 2, steps), kBoth);
  if (step > 0) h.Steps("worker-0", 1, step);
}

// Those that were told to stop have stopped.
inline void LetGo(Harness& h, const std::vector<std::string>& names) {
  for (const std::string& name : names) h.Idle(name);
}

// worker-1 dies and another process takes its place.
inline void Replace(Harness& h) {
  h.Exit("worker-1", 0, 9);
  LetGo(h, {"worker-0"});
  h.Forget("worker-1");
  h.Join("worker-1");
}

inline void Begin(Harness& h) {
  for (const std::string& name : kBoth) h.Work(name, 0, "loading");
  for (const std::string& name : kBoth) h.Arrive(name, "start");
}

inline double StepsLost(const Harness& h) {
  double sum = 0;
  for (const Measure& measure : h.measures()) {
    if (measure.kind == MetricKind::kStepsLost) sum += measure.value;
  }
  return sum;
}

inline uint64_t ToldOf(Harness& h) {
  uint64_t sum = 0;
  for (const v1::StepRecord& record : h.HistoryRecords("a-1")) sum += record.steps_lost();
  return sum;
}

}  // namespace zeroshard::coordinator
