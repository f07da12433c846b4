// A small offloaded job that runs, for tests of what happens to it then.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/coordinator/core/offload_harness.h"

namespace zeroshard::coordinator {

inline const std::vector<std::string> kBoth = {"worker-0", "worker-1"};

inline std::vector<uint64_t> UpTo(uint64_t last) {
  std::vector<uint64_t> steps;
  for (uint64_t step = 1; step <= last; ++step) steps.push_back(step);
  return steps;
}

inline uint64_t BytesOfJob(const v1::JobSpec& spec) { return MakeStoreNeeds(spec, 4096)->bytes; }

// Two workers and as many stores, and job "a" RUNNING.
inline void Start(OffloadHarness& h, int stores, uint32_t replicas = 1, uint64_t steps = 6) {
  h.JoinMany(2);
  for (int i = 0; i < stores; ++i) h.StartStore(absl::StrCat("store-", i));
  h.StartOffloaded(OffloadHarness::OffloadSpec("a", 2, steps, replicas));
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
}

// One that can be saved.
inline void StartSaved(OffloadHarness& h, int stores = 1, uint32_t replicas = 1,
                       uint64_t interval = 0, uint64_t steps = 9) {
  h.JoinMany(2);
  for (int i = 0; i < stores; ++i) h.StartStore(absl::StrCat("store-", i));
  h.StartOffloaded(OffloadHarness::SavedSpec("a", 2, steps, interval, replicas));
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
}

// With the generation that was opened for it.
inline void GoOn(OffloadHarness& h) {
  h.BeginRanks("a");
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
}

inline void Finish(OffloadHarness& h) {
  h.TrainTo("a", h.Status("a").steps());
  for (const std::string& name : kBoth) {
    if (!h.Status("a").ranks().empty()) h.End(name);
  }
  h.Pump();
}

// To its end, each step once in its history, and so many of them lost on the way.
inline void ExpectFinishes(OffloadHarness& h, uint64_t steps_lost = 0) {
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").steps_lost(), steps_lost);
  EXPECT_EQ(h.History("a-1"), UpTo(h.Status("a").steps()));
}

inline double Measured(const OffloadHarness& h, MetricKind kind) {
  double sum = 0;
  for (const Measure& measure : h.measures()) {
    if (measure.kind == kind) sum += measure.value;
  }
  return sum;
}

}  // namespace zeroshard::coordinator
