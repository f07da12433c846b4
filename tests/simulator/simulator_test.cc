#include <gtest/gtest.h>

#include "tests/simulator/scenario.h"

namespace zeroshard::simulator {
namespace {

constexpr uint64_t kSeedsEach = 40;
constexpr size_t kTraceShown = 6000;

std::string Describe(uint64_t seed, const Outcome& outcome) {
  const std::string& trace = outcome.trace;
  return "seed " + std::to_string(seed) + " (" + outcome.setting + "): " + outcome.violation +
         "\nrun `simulator --seeds 1 --from " + std::to_string(seed) +
         " --verbose` to see all of it; the last events:\n" +
         (trace.size() > kTraceShown ? trace.substr(trace.size() - kTraceShown) : trace);
}

TEST(Simulator, UndisturbedJobsFollowTheReference) {
  ScenarioOptions options;
  options.faults = false;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    const Outcome outcome = Simulate(seed, options);
    ASSERT_TRUE(outcome.ok) << Describe(seed, outcome);
    EXPECT_GT(outcome.decisions, 0u);
    EXPECT_EQ(outcome.recoveries, 0u);
    EXPECT_EQ(outcome.rollbacks, 0u);
    EXPECT_EQ(outcome.boots, 1u);
    EXPECT_EQ(outcome.made_up, 0u);
    EXPECT_EQ(outcome.left_out, 0u);
  }
}

TEST(Simulator, TheSameSeedGivesTheSameRun) {
  const Outcome first = Simulate(7);
  const Outcome second = Simulate(7);
  EXPECT_EQ(first.steps, second.steps);
  EXPECT_EQ(first.trace, second.trace);
}

class Disturbed : public testing::TestWithParam<uint64_t> {};

TEST_P(Disturbed, EveryInvariantHoldsAndTheRunEndsAsAnUndisturbedOne) {
  uint64_t recoveries = 0, rollbacks = 0, boots = 0, made_up = 0;
  for (uint64_t seed = GetParam(); seed < GetParam() + kSeedsEach; ++seed) {
    const Outcome outcome = Simulate(seed);
    ASSERT_TRUE(outcome.ok) << Describe(seed, outcome);
    recoveries += outcome.recoveries;
    rollbacks += outcome.rollbacks;
    boots += outcome.boots - 1;
    made_up += outcome.made_up;
  }
  // The seeds are of use only where they reach these.
  EXPECT_GT(recoveries, 0u);
  EXPECT_GT(rollbacks, 0u);
  EXPECT_GT(boots, 0u);
  EXPECT_GT(made_up, 0u);
}

// It takes a store that dies within the seconds in which another one copies what it alone holds.
TEST(Simulator, JobsWhoseCopiesLoseTheirSourceForGoodGoBackToo) {
  uint64_t cut_copies = 0, left = 0;
  for (uint64_t seed = 5001; seed <= 5400; ++seed) {
    const Outcome outcome = Simulate(seed);
    ASSERT_TRUE(outcome.ok) << Describe(seed, outcome);
    cut_copies += outcome.cut_copies;
    left += outcome.left;
  }
  EXPECT_GT(cut_copies, 0u);
  EXPECT_GT(left, 0u);
}

// Each of these is ended by the core only where no other store is left for it.
TEST(Simulator, JobsGoOnBesideDisksThatTakeNoState) {
  uint64_t broken = 0, jobs = 0, refused = 0;
  for (uint64_t seed = 7001; seed <= 7200; ++seed) {
    const Outcome outcome = Simulate(seed);
    ASSERT_TRUE(outcome.ok) << Describe(seed, outcome);
    broken += outcome.broken;
    refused += outcome.refused;
    ++jobs;
  }
  EXPECT_GT(broken, 50u);
  EXPECT_GT(refused, 0u);
  EXPECT_LT(refused, jobs / 4);  // most go on
}

TEST(Simulator, JobsWithTheirStateOnTheirRanksGoOnFromTheirCheckpoints) {
  ScenarioOptions options;
  options.on_ranks = true;
  options.faults = false;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    const Outcome outcome = Simulate(seed, options);
    ASSERT_TRUE(outcome.ok) << Describe(seed, outcome);
    EXPECT_EQ(outcome.recoveries, 0u);
    EXPECT_EQ(outcome.went_back, 0u);
  }
  options.faults = true;
  uint64_t recoveries = 0, went_back = 0, boots = 0, given_up = 0, unreported = 0;
  for (uint64_t seed = 9001; seed <= 9600; ++seed) {
    const Outcome outcome = Simulate(seed, options);
    ASSERT_TRUE(outcome.ok) << Describe(seed, outcome);
    recoveries += outcome.recoveries;
    went_back += outcome.went_back;
    boots += outcome.boots - 1;
    given_up += outcome.given_up;
    unreported += outcome.unreported;
  }
  EXPECT_GT(recoveries, 100u);
  EXPECT_GT(went_back, 50u);
  EXPECT_GT(boots, 50u);
  EXPECT_GT(unreported, 0u);
  EXPECT_LT(given_up, 30u);  // most go on
}

INSTANTIATE_TEST_SUITE_P(Seeds, Disturbed, testing::Values(1, 1001, 2001, 3001));

}  // namespace
}  // namespace zeroshard::simulator
