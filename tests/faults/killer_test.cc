// Kills processes of offloaded jobs at random times, from seeds that are printed: whatever dies,
// the job completes, its history is the undisturbed run's and its weights are the same.
//
//   ZEROSHARD_FAULT_RUNS=N     runs of each kind; 0: without end. Default 9
//   ZEROSHARD_FAULT_SECONDS=S  a kind that is not through by then fails. Default 240
//   ZEROSHARD_FAULT_SEED=K     the first run's seed, for one that failed
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster/offload_fixture.h"
#include "tests/faults/tally.h"

namespace zeroshard::cluster {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

uint64_t Setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  uint64_t value = 0;
  EXPECT_TRUE(absl::SimpleAtoi(text, &value)) << name << "=" << text << "; wanted a number";
  return value;
}

struct Kind {
  const char* name;
  int stores;
  int replicas;
  bool parameters;
  const char* checkpoint;  // interval; null: none
  const char* device = "cpu";
};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

// `zeroshard local` gives a daemon up that dies six times in a row, and a job five recoveries in a
// row without a step between; what is tested here is below both.
constexpr int kMostKills = 5;
constexpr int kMostOfOne = 3;
constexpr int kMostWithoutAStep = 3;
// So many seeds in a row plan each moment and each role at least twice; a worker stands for rank 0
// while nobody has it.
constexpr uint64_t kRunsThatCover = 9;

// What a run's first kill hits; those after it are left to chance.
struct Plan {
  Moment moment;
  Role role;
};

Plan PlanOf(uint64_t seed) {
  return {static_cast<Moment>(seed % kMoments),
          static_cast<Role>((seed + seed / kMoments) % kRoles)};
}

// Where the windows are short, so is the pause within them.
uint64_t LongestPauseMs(Moment moment) {
  switch (moment) {
    case Moment::kDaemonsStart:
      return 200;
    case Moment::kJobStarts:
      return 60;
    case Moment::kFirstStep:
      return 15;
    case Moment::kLater:
      return 50;
  }
  return 0;
}

class Killer : public OffloadTest, public testing::WithParamInterface<Kind> {
 protected:
  // One run of the job, from the first daemon's start on.
  struct Run {
    std::string workdir;
    std::mt19937_64 random;
    std::unique_ptr<Process> local;
    steady_clock::time_point begun;
    bool stepped = false;
    std::vector<Kill> kills;

    uint64_t Below(uint64_t n) { return random() % n; }
  };

  std::vector<std::string> Args() const {
    const Kind& kind = GetParam();
    std::vector<std::string> args =
        Endurance(kind.stores, kind.replicas, kind.parameters, kind.device);
    if (kind.checkpoint != nullptr) {
      args.insert(
          args.end(),
          {"--set", absl::StrCat("checkpoint={dir: ckpt, interval_steps: ", kind.checkpoint, "}")});
    }
    return args;
  }

  // From here on `local` starts again what dies; before, it ends with the daemon's name.
  static bool IsAccepted(const Run& run) {
    return absl::StrContains(run.local->Out(), "\"status\"");
  }

  Moment Now(Run* run) const {
    // After a roll-back to the start there may be none again.
    run->stepped = run->stepped || !History(run->workdir).empty();
    if (run->stepped) return Moment::kLater;
    if (!IsAccepted(*run)) return Moment::kDaemonsStart;
    const std::string log = ReadText(WorkPath(run->workdir, "logs/coordinator.log"));
    return absl::StrContains(log, " is RUNNING") ? Moment::kFirstStep : Moment::kJobStarts;
  }

  // By the last status that `local` printed; empty while none names it.
  static std::string MemberOfRankZero(const Run& run) {
    const std::string out = run.local->Out();
    const size_t begin = out.rfind("{\"status\"");
    if (begin == std::string::npos) return "";
    const auto json = nlohmann::ordered_json::parse(
        out.substr(begin, out.find('\n', begin) - begin), nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) return "";
    for (const auto& rank : json["status"]["ranks"]) {
      if (rank["rank"] == 0) return rank["member"];
    }
    return "";
  }

  // Empty while none is there. `draw` chooses among those that are.
  std::string VictimOf(const Run& run, Role role, uint64_t draw) const {
    if (role == Role::kCoordinator) return "coordinator";
    const std::string rank_zero = MemberOfRankZero(run);
    if (role == Role::kRankZero) return rank_zero;
    const std::string prefix = role == Role::kStore ? "store-" : "worker-";
    std::vector<std::string> names;
    for (const std::string& name : Daemons(run.workdir)) {
      if (absl::StartsWith(name, prefix) && name != rank_zero) names.push_back(name);
    }
    return names.empty() ? "" : names[draw % names.size()];
  }

  // True if there was one to kill. A port file outlives its daemon, and the pid in it may by then
  // be another's: only a living child of `local` is killed.
  bool Strike(Run* run, Role role, uint64_t draw) {
    const std::string victim = VictimOf(*run, role, draw);
    if (victim.empty()) return false;
    const auto before = std::count_if(run->kills.begin(), run->kills.end(),
                                      [&](const Kill& kill) { return kill.victim == victim; });
    if (before >= kMostOfOne) return false;
    const pid_t pid = PidOf(run->workdir, victim);
    if (pid <= 0 || !IsAlive(pid) || ParentOf(pid) != run->local->pid()) return false;
    const Moment moment = Now(run);
    const size_t steps = History(run->workdir).size();
    if (kill(pid, SIGKILL) != 0) return false;
    const std::chrono::duration<double> seconds = steady_clock::now() - run->begun;
    run->kills.push_back({victim, role, moment, steps, seconds.count()});
    return true;
  }

  // Waits, looking often, until it holds or the run is over; false if it does not hold.
  template <typename Condition>
  bool Await(Run* run, const Condition& condition) {
    const auto until = steady_clock::now() + absl::ToChronoSeconds(kPatience);
    while (!condition()) {
      if (run->local->Ended() || steady_clock::now() > until) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  }

  void FirstKill(const Plan& plan, Run* run) {
    const uint64_t pause = run->Below(LongestPauseMs(plan.moment));
    const uint64_t steps = 1 + run->Below(80);
    const uint64_t draw = run->random();
    // No rank has a member yet.
    const Role role = plan.moment == Moment::kDaemonsStart && plan.role == Role::kRankZero
                          ? Role::kWorker
                          : plan.role;
    if (!Await(run, [&] {
          return plan.moment == Moment::kLater ? History(run->workdir).size() >= steps
                                               : Now(run) >= plan.moment;
        })) {
      return;
    }
    std::this_thread::sleep_for(milliseconds(pause));
    Await(run, [&] { return Strike(run, role, draw); });
    if (run->kills.empty() || run->kills.front().moment != Moment::kDaemonsStart) return;
    if (Await(run, [&] { return IsAccepted(*run); })) return;
    // It need not have made it that far; whoever reads why knows whom to look at.
    ASSERT_TRUE(run->local->Ended());
    EXPECT_NE(run->local->Wait(kPatience), 0);
    EXPECT_THAT(run->local->Err(), testing::HasSubstr(run->kills.front().victim));
    run->local = StartJson(run->workdir, Args());
  }

  void MoreKills(Run* run) {
    const uint64_t more = run->Below(kMostKills);
    for (uint64_t i = 0; i < more; ++i) {
      if (!Await(run, [&] { return IsAccepted(*run); })) return;
      const auto at = steady_clock::now() + milliseconds(run->Below(3000));
      const uint64_t role = run->Below(kRoles);
      const uint64_t draw = run->random();
      if (!Await(run, [&] { return steady_clock::now() >= at; })) return;
      if (run->kills.size() == kMostWithoutAStep && !AwaitAStep(run)) return;
      // Another's turn comes where nobody of this role is back soon, or may be killed again.
      uint64_t tries = 0;
      if (!Await(run, [&] {
            return Strike(run, static_cast<Role>((role + tries++ / 500) % kRoles), draw);
          })) {
        return;
      }
    }
  }

  bool AwaitAStep(Run* run) {
    size_t fewest = History(run->workdir).size();
    return Await(run, [&] {
      const size_t steps = History(run->workdir).size();
      fewest = std::min(fewest, steps);
      return steps > fewest;
    });
  }
};

TEST_P(Killer, WhateverDiesTheHistoryIsTheUndisturbedOnes) {
  const uint64_t runs = Setting("ZEROSHARD_FAULT_RUNS", kRunsThatCover);
  const uint64_t seconds = Setting("ZEROSHARD_FAULT_SECONDS", 240);
  const uint64_t first = Setting(
      "ZEROSHARD_FAULT_SEED",
      static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count()) / 1000);
  const auto end = steady_clock::now() + std::chrono::seconds(seconds);
  Tally tally(GetParam().name);
  const Result wanted = Undisturbed(Args());
  ASSERT_FALSE(HasFailure());
  const auto through = [&] {
    if (runs == 0) return false;
    return tally.runs() >= runs && (runs < kRunsThatCover || tally.Missing().empty());
  };
  while (!through()) {
    if (runs != 0 && steady_clock::now() > end) {
      tally.End();
      FAIL() << "in " << seconds << " s (ZEROSHARD_FAULT_SECONDS) " << tally.runs() << " of "
             << runs << " runs were done; " << tally.Summary()
             << "; not hit: " << absl::StrJoin(tally.Missing(), ", ");
    }
    const uint64_t seed = first + tally.runs();
    Run run;
    run.workdir = absl::StrCat("run-", tally.runs());
    run.random.seed(seed);
    run.begun = steady_clock::now();
    run.local = StartJson(run.workdir, Args());
    FirstKill(PlanOf(seed), &run);
    if (!HasFailure()) MoreKills(&run);
    const Result seen = Finish(run.workdir, run.local.get());
    EXPECT_FALSE(run.kills.empty()) << "the run was over before anything could be killed";
    EXPECT_EQ(seen.history, wanted.history);
    EXPECT_EQ(seen.digest, wanted.digest);
    EXPECT_EQ(seen.steps_lost, seen.status["steps_lost"]);
    const std::chrono::duration<double> took = steady_clock::now() - run.begun;
    tally.Add(seed, run.kills, took.count(), !HasFailure());
    ASSERT_FALSE(HasFailure()) << "again with ZEROSHARD_FAULT_SEED=" << seed
                               << " ZEROSHARD_FAULT_RUNS=1; " << Words(run.kills);
    std::filesystem::remove_all(WorkPath(run.workdir, ""));
  }
  tally.End();
}

INSTANTIATE_TEST_SUITE_P(Offload, Killer,
                         testing::Values(Kind{"OneStore", 1, 1, false, "15"},
                                         Kind{"ThreeStores", 3, 1, true, "15"},
                                         Kind{"Replicas", 3, 2, false, "15"},
                                         Kind{"ReplicasWithoutCheckpoints", 3, 2, true, nullptr},
                                         Kind{"Disks", 2, 1, true, "15", "nvme"},
                                         Kind{"DisksReplicas", 3, 2, false, "15", "nvme"}),
                         [](const testing::TestParamInfo<Kind>& info) { return info.param.name; });

}  // namespace
}  // namespace zeroshard::cluster
