// A thousand members that come, go, stall and meet at barriers, with jobs of many sizes and
// coordinators that die, from a seeded generator. What must hold is checked after every round.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "coordinator/core/text.h"
#include "tests/coordinator/core/sim_worker.h"

namespace zeroshard::coordinator {
namespace {

TEST(Scale, AThousandMembersMeetAtABarrierAndTheMissingAreNamed) {
  Harness h;
  h.JoinMany(1000);
  h.SubmitJob(Harness::Spec("big", 1000));
  std::vector<std::string> names;
  for (int i = 0; i < 1000; ++i) names.push_back(absl::StrCat("worker-", i));
  std::vector<RequestId> waiting;
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(h.member(names[i]).assign->rank(), static_cast<uint32_t>(i));
    if (i != 500) waiting.push_back(h.Arrive(names[i], "start", absl::Seconds(5)));
  }
  h.AdvanceBeating(absl::Seconds(5), names);
  for (const RequestId id : waiting) {
    ASSERT_TRUE(h.Answered(id));
    ASSERT_EQ(h.Answer(id).status.code(), absl::StatusCode::kDeadlineExceeded);
  }
  EXPECT_THAT(std::string(h.Answer(waiting[0]).status.message()),
              ::testing::HasSubstr("1 of 1000 ranks had not arrived: rank 500 (worker-500"));
  std::vector<RequestId> again;
  for (const std::string& name : names) again.push_back(h.Arrive(name, "start"));
  for (const RequestId id : again) EXPECT_TRUE(h.Answer(id).status.ok());
  EXPECT_EQ(h.Status("big").state(), v1::JOB_STATE_RUNNING);
}

// Remembers what must never go back.
class Invariants {
 public:
  void Check(const Harness& h, const Core& core) {
    EXPECT_GE(core.term(), term_);
    term_ = core.term();
    std::map<std::string, std::string> holder;  // member -> run
    for (const auto& [run_id, run] : core.runs()) {
      Seen& seen = seen_[run_id];
      EXPECT_GE(run.job.generation, seen.generation) << run_id;
      EXPECT_GE(run.job.committed_step, seen.committed) << run_id;
      if (IsEnded(seen.state)) {
        EXPECT_EQ(run.job.state, seen.state) << run_id;
      }
      EXPECT_EQ(run.job.committed_step, h.History(run_id).size()) << run_id;
      seen = Seen{run.job.generation, run.job.committed_step, run.job.state};
      if (!run.Live()) continue;
      std::set<std::string> distinct;
      for (const RankState& rank : run.ranks) {
        EXPECT_TRUE(distinct.insert(rank.record.member).second) << run_id;
        if (rank.record.ended || rank.lost || rank.exit) continue;
        const auto [other, fresh] = holder.emplace(rank.record.incarnation, run_id);
        EXPECT_TRUE(fresh) << rank.record.member << " in " << run_id << " and " << other->second;
      }
    }
  }
  // Runs of every end that were seen.
  std::map<v1::JobState, int> Ends() const {
    std::map<v1::JobState, int> ends;
    for (const auto& [run_id, seen] : seen_) ++ends[seen.state];
    return ends;
  }

 private:
  struct Seen {
    uint64_t generation = 0;
    uint64_t committed = 0;
    v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
  };
  uint64_t term_ = 0;
  std::map<std::string, Seen> seen_;
};

class Churn : public ::testing::TestWithParam<uint64_t> {};

TEST_P(Churn, NoMemberIsEverInTwoRunsAndNothingGoesBack) {
  std::mt19937_64 random(GetParam());
  const auto upto = [&](uint64_t most) { return random() % (most + 1); };
  const auto chance = [&](uint64_t percent) { return random() % 100 < percent; };
  CoreOptions options;
  options.heartbeat_interval = absl::Seconds(2);
  Harness h(options);
  std::vector<SimWorker> workers;
  for (int i = 0; i < 1000; ++i) {
    const std::string name = absl::StrCat("worker-", i);
    h.Join(name, absl::StrCat("host-", i % 50));
    workers.emplace_back(&h, name);
  }
  std::set<size_t> silent;  // stopped processes: they neither speak nor hear
  Invariants invariants;
  int jobs = 0;
  for (int round = 0; round < 60; ++round) {
    if (round < 40 && chance(60)) {
      const uint32_t size = chance(10) ? 600 : 1 + static_cast<uint32_t>(upto(120));
      h.SubmitJob(Harness::Spec(absl::StrCat("job-", jobs++), size, 1 + upto(3)));
    }
    for (uint64_t n = upto(3); n > 0 && round < 40; --n) {
      const size_t victim = upto(999);
      if (silent.contains(victim)) continue;
      switch (upto(3)) {
        case 0:  // killed under a supervisor
          h.Exit(workers[victim].name(), 0, 9);
          h.Idle(workers[victim].name());
          h.Disconnect(workers[victim].name());
          break;
        case 1:  // its stream breaks and it comes back
          h.Disconnect(workers[victim].name());
          break;
        default:  // stopped, until it wakes much later
          silent.insert(victim);
          break;
      }
    }
    if (chance(5)) h.Restart();
    if (chance(5) && jobs > 0) h.CancelJob(absl::StrCat("job-", upto(jobs - 1)));
    for (auto it = silent.begin(); it != silent.end();) {
      it = chance(5) || round >= 40 ? silent.erase(it) : std::next(it);
    }
    for (size_t i = 0; i < workers.size(); ++i) {
      if (!silent.contains(i)) workers[i].Act();
    }
    h.Advance(absl::Seconds(1));
    invariants.Check(h, h.core());
    if (::testing::Test::HasFailure()) FAIL() << "seed " << GetParam() << ", round " << round;
  }
  for (int round = 0; round < 200; ++round) {
    const std::vector<v1::JobStatus> list = h.core().List();
    if (std::all_of(list.begin(), list.end(),
                    [](const v1::JobStatus& job) { return IsEnded(job.state()); })) {
      break;
    }
    for (SimWorker& worker : workers) worker.Act();
    h.Advance(absl::Seconds(1));
    invariants.Check(h, h.core());
  }
  for (const v1::JobStatus& job : h.core().List()) {
    EXPECT_TRUE(IsEnded(job.state())) << job.run_id() << ": " << job.reason();
  }
  const auto ends = invariants.Ends();
  EXPECT_GT(ends.contains(v1::JOB_STATE_COMPLETED) ? ends.at(v1::JOB_STATE_COMPLETED) : 0, 3);
}

INSTANTIATE_TEST_SUITE_P(Seeds, Churn, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace zeroshard::coordinator
