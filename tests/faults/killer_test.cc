// Kills processes of offloaded jobs at random times, from a seed that is printed: whatever dies,
// the job completes, its history is the undisturbed run's and its weights are the same.
//
//   ZEROSHARD_FAULT_RUNS=N     runs of each kind; 0: without end. Default 9
//   ZEROSHARD_FAULT_SECONDS=S  no run is begun later than that, unless they are without end
//   ZEROSHARD_FAULT_SEED=K     the first run's seed, for one that failed
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "tests/cluster/offload_fixture.h"

namespace zeroshard::cluster {
namespace {

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

class Killer : public OffloadTest, public testing::WithParamInterface<Kind> {
 protected:
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
  // Returns what was done, in words.
  std::string Disturb(const std::string& workdir, uint64_t seed, Process* local) {
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t n) { return random() % n; };
    std::map<std::string, int> killed;
    std::vector<std::string> did;
    const uint64_t kills = 1 + below(kMostKills);
    // The first comes at any time from the start of the first daemon on.
    if (!Eventually(kPatience, [&] { return !Daemons(workdir).empty() || local->Ended(); })) {
      return "nothing started";
    }
    for (uint64_t i = 0; i < kills && !local->Ended(); ++i) {
      const auto pause = std::chrono::milliseconds(below(3000));
      std::this_thread::sleep_for(pause);
      const std::vector<std::string> daemons = Daemons(workdir);
      const std::string victim = daemons[below(daemons.size())];
      // Before every daemon is a member, `local` takes an end for a failure of its own.
      if (History(workdir).empty() || killed[victim] >= kMostOfOne) continue;
      const pid_t pid = PidOf(workdir, victim);
      if (pid <= 0 || kill(pid, SIGKILL) != 0) continue;
      ++killed[victim];
      did.push_back(absl::StrCat(victim, " after ", History(workdir).size(), " steps"));
    }
    return absl::StrJoin(did, ", ");
  }
};

TEST_P(Killer, WhateverDiesTheHistoryIsTheUndisturbedOnes) {
  const uint64_t runs = Setting("ZEROSHARD_FAULT_RUNS", 9);
  const uint64_t seconds = Setting("ZEROSHARD_FAULT_SECONDS", 600);
  const uint64_t first = Setting(
      "ZEROSHARD_FAULT_SEED",
      static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count()) / 1000);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  const Result wanted = Undisturbed(Args());
  ASSERT_FALSE(HasFailure());
  for (uint64_t run = 0; runs == 0 || run < runs; ++run) {
    if (runs != 0 && std::chrono::steady_clock::now() > end) {
      std::cout << run << " of " << runs << " runs done in the time there was" << std::endl;
      break;
    }
    const uint64_t seed = first + run;
    const std::string workdir = absl::StrCat("run-", run);
    const auto local = StartJson(workdir, Args());
    const std::string what = Disturb(workdir, seed, local.get());
    std::cout << GetParam().name << " seed " << seed << ": killed "
              << (what.empty() ? "nothing" : what) << std::endl;
    const Result seen = Finish(workdir, local.get());
    EXPECT_EQ(seen.history, wanted.history);
    EXPECT_EQ(seen.digest, wanted.digest);
    ASSERT_FALSE(HasFailure()) << "again with ZEROSHARD_FAULT_SEED=" << seed
                               << " ZEROSHARD_FAULT_RUNS=1; killed " << what;
    std::filesystem::remove_all(WorkPath(workdir, ""));
  }
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
