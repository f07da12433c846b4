// One seed: a cluster, one or two jobs, faults at random, and what must hold to the end.
#pragma once

#include <cstdint>
#include <string>

namespace zeroshard::simulator {

struct Outcome {
  bool ok = false;
  std::string violation;
  std::string setting;  // of the seed, in words
  std::string trace;    // the last events
  // What happened, to see that the seeds reach what they should.
  uint64_t steps = 0, faults = 0, recoveries = 0, rollbacks = 0, decisions = 0, boots = 0;
  uint64_t given_up = 0;    // jobs, after too many faults in a row
  uint64_t cut_copies = 0;  // rollbacks with a copy under way whose source was lost
  uint64_t left = 0;        // rollbacks to what was saved for stores that left, no step lost
  uint64_t made_up = 0;     // generations that began with a loss which the one before owed
  uint64_t left_out = 0;    // losses on the validation set that a history does without
  uint64_t broken = 0;      // disks that took no state for a while, or for good
  uint64_t went_back = 0;   // jobs with their state on their ranks, to a checkpoint of theirs
  uint64_t unreported = 0;  // histories that lack steps which nobody reported before a loss
  uint64_t refused = 0;     // jobs that ended as no store was left that took their state
  double seconds = 0;       // simulated
};

struct ScenarioOptions {
  bool faults = true;
  bool verbose = false;
  bool on_ranks = false;  // the jobs have their state on their ranks, and checkpoints
};

// Deterministic: the same seed gives the same outcome.
Outcome Simulate(uint64_t seed, const ScenarioOptions& options = {});

}  // namespace zeroshard::simulator
