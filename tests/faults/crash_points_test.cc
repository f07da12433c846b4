// Processes of offloaded jobs that kill themselves at the points of common/crash_point.h: before
// and after a step is staged, logged and applied, in worker, coordinator and store. Whatever dies
// where, the job completes, its history is the undisturbed run's, and its weights are the same.
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/cluster/offload_fixture.h"

namespace zeroshard::cluster {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::Ge;
using testing::HasSubstr;
using testing::Le;
using Json = nlohmann::ordered_json;
using Strings = std::vector<std::string>;

// With a checkpoint every second step one is complete at the crash, or on its way.
constexpr int kCrashStep = 5;
constexpr int kSteps = 40;  // the job does not end while it is looked at

// What `zeroshard local` and its daemons are started with while it lives.
class CrashAt {
 public:
  explicit CrashAt(const std::string& what) { setenv(kVariable, what.c_str(), 1); }
  ~CrashAt() { unsetenv(kVariable); }
  CrashAt(const CrashAt&) = delete;
  CrashAt& operator=(const CrashAt&) = delete;

 private:
  static constexpr char kVariable[] = "ZEROSHARD_CRASH_AT";
};

struct Group {
  const char* name;
  Strings points;
  int stores;
  int replicas;
  bool parameters;  // offloaded too
  bool bf16;
  const char* device = "cpu";
};

void PrintTo(const Group& group, std::ostream* out) { *out << group.name; }

class CrashPoints : public OffloadTest, public testing::WithParamInterface<Group> {
 protected:
  static bool LosesStore() { return absl::StartsWith(GetParam().points.front(), "store."); }
  // Where chunks are on one store alone, a lost one takes the job back to a checkpoint.
  static bool LosesSteps() { return LosesStore() && GetParam().replicas == 1; }
  static Strings Args() {
    const Group& group = GetParam();
    Strings args = Offload(group.stores, group.replicas, group.parameters, group.device);
    args.insert(args.end(), {"--set", absl::StrCat("steps=", kSteps), "--set",
                             absl::StrCat("bf16.enabled=", group.bf16 ? "true" : "false")});
    if (LosesSteps())
      args.insert(args.end(), {"--set", "checkpoint={dir: ckpt, interval_steps: 2}"});
    return args;
  }
  // All that `local` printed.
  static std::vector<Json> Statuses(const Process& local) {
    std::vector<Json> statuses;
    for (const auto line : absl::StrSplit(local.Out(), '\n', absl::SkipEmpty())) {
      Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (json.is_object() && json.contains("status")) statuses.push_back(json["status"]);
    }
    return statuses;
  }

  // In no status was a store that has the state of the job's epoch ahead of the committed step, or
  // more than one behind it.
  static void ExpectVersions(const std::vector<Json>& statuses) {
    for (const Json& status : statuses) {
      const int committed = status["committed_step"];
      if (!status.contains("stores")) continue;
      for (const Json& store : status["stores"]) {
        const bool here = store["phase"] == "READY" || store["phase"] == "APPLYING";
        if (!here || store["version"]["epoch"] != status["version"]["epoch"]) continue;
        EXPECT_THAT(store["version"]["step"].get<int>(), AllOf(Ge(committed - 1), Le(committed)))
            << status;
      }
    }
  }
  bool IsAtTheCommittedVersion(const std::string& workdir, std::string* seen) {
    const auto run = Run({"status", "small", "--output", "json", "--coordinator",
                          AddressOf(workdir, "coordinator")});
    *seen = run->Out();
    const Json status = Json::parse(*seen, nullptr, /*allow_exceptions=*/false);
    if (!status.is_object() || !status.contains("stores")) return false;
    int chunks = 0;
    for (const Json& store : status["stores"]) {
      if (store["phase"] != "READY" || store["version"] != status["version"]) return false;
      chunks += store["usage"]["chunks"].get<int>();
    }
    return status["committed_step"] == status["version"]["step"] &&
           chunks == GetParam().replicas * status["store_plan"]["chunks"].get<int>();
  }
  // Some way behind the crash the ranks are held, so that no step is decided any more: then all
  // copies of all chunks get to the version of the last that was.
  void ExpectEveryChunkAtTheCommittedVersion(const std::string& workdir, Process* local) {
    ASSERT_TRUE(AwaitSteps(workdir, kCrashStep + 1, local));
    const pid_t worker = PidOf(workdir, "worker-0");
    ASSERT_GT(worker, 0);
    ASSERT_EQ(kill(worker, SIGSTOP), 0);
    std::string seen;
    // Well before the worker is taken for dead.
    EXPECT_TRUE(Eventually(absl::Seconds(8), [&] {
      return IsAtTheCommittedVersion(workdir, &seen);
    })) << seen;
    ASSERT_EQ(kill(worker, SIGCONT), 0);
  }

  // Of the point's step, whether it was decided when the process died; nothing where that may be so
  // or not: a rank that is not the first does not hear of it, and a store is not asked first.
  static std::optional<bool> WasDecided(const std::string& point) {
    const auto any = [&](const Strings& parts) {
      return std::any_of(parts.begin(), parts.end(),
                         [&](const std::string& part) { return absl::StrContains(point, part); });
    };
    if (any({"push", "before_commit@0", "before_log", "before_sealed"})) return false;
    if (any({"before_commit@1", "before_pull@1", "after_sealed"})) return std::nullopt;
    return true;
  }
  static void ExpectRecovered(const std::string& point, const Result& seen,
                              const std::vector<Json>& statuses) {
    const std::string events = seen.status["events"].dump();
    const int lost = seen.status["steps_lost"];
    const std::optional<bool> decided = WasDecided(point);
    const int committed = kCrashStep - (decided.value_or(true) ? 0 : 1);
    if (LosesSteps()) {
      EXPECT_THAT(seen.status["version"]["epoch"].get<int>(), Ge(2));
      EXPECT_THAT(lost, AllOf(Ge(decided.value_or(false) ? 1 : 0), Le(committed))) << events;
      return;
    }
    EXPECT_EQ(lost, 0) << events;
    if (absl::StartsWith(point, "coordinator.")) {
      EXPECT_THAT(events, HasSubstr(absl::StrCat("the coordinator started again (term 2) at step ",
                                                 committed, ";")));
      return;
    }
    EXPECT_THAT(events, HasSubstr("RECOVERING"));
    EXPECT_THAT(seen.status["generation"].get<int>(), Ge(2));
    for (const Json& status : statuses) {
      // Later, a store may be filled again, when more steps are done.
      if (status["state"] != "RECOVERING" || status["committed_step"] > kCrashStep || !decided)
        continue;
      EXPECT_EQ(status["committed_step"], committed) << status;
    }
  }
};

TEST_P(CrashPoints, TheStepIsDoneOnceAndWhole) {
  const Result wanted = Undisturbed(Args());
  ASSERT_FALSE(HasFailure());
  ASSERT_EQ(wanted.history.size(), static_cast<size_t>(kSteps));
  ASSERT_FALSE(wanted.digest.empty());
  int run = 0;
  for (const std::string& point : GetParam().points) {
    SCOPED_TRACE(point);
    const std::string workdir = absl::StrCat("w", ++run);
    const std::string hit = absl::StrCat(folder_, "/hit-", run);
    std::unique_ptr<Process> local;
    {
      const CrashAt crash(absl::StrCat(point, ":", kCrashStep, ":", hit));
      local = StartJson(workdir, Args());
    }
    ExpectEveryChunkAtTheCommittedVersion(workdir, local.get());
    const Result seen = Finish(workdir, local.get());
    ASSERT_TRUE(fs::exists(hit)) << "nothing came to " << point;
    EXPECT_EQ(seen.status["state"], "COMPLETED");
    EXPECT_EQ(seen.history, wanted.history);
    EXPECT_EQ(seen.digest, wanted.digest);
    const std::vector<Json> statuses = Statuses(*local);
    ExpectRecovered(point, seen, statuses);
    ExpectVersions(statuses);
    if (LosesSteps()) ExpectSound(WorkPath(workdir, "ckpt/small"));
    ASSERT_FALSE(HasFailure()) << local->Out() << local->Err();
    fs::remove_all(WorkPath(workdir, ""));
  }
}

Strings WorkerPoints(int rank) {
  Strings points;
  for (const char* where :
       {"before_push", "mid_push", "before_commit", "before_pull", "after_pull"})
    points.push_back(absl::StrCat("worker.", where, "@", rank));
  return points;
}

Strings CoordinatorPoints() {
  return {"coordinator.before_log", "coordinator.after_log", "coordinator.after_answer",
          "coordinator.mid_tell"};
}

Strings StorePoints() {
  return {"store.before_sealed", "store.after_sealed",   "store.before_apply",
          "store.mid_apply",     "store.before_applied", "store.after_applied"};
}

INSTANTIATE_TEST_SUITE_P(
    Offload, CrashPoints,
    testing::Values(Group{"RankZero", WorkerPoints(0), 2, 2, true, true},
                    Group{"RankOne", WorkerPoints(1), 2, 2, false, true},
                    Group{"Coordinator", CoordinatorPoints(), 2, 2, false, true},
                    Group{"StoreOfTwo", StorePoints(), 3, 2, false, true},
                    Group{"StoreAlone", StorePoints(), 2, 1, true, false},
                    Group{"DiskOfTwo", {"store.mid_apply"}, 3, 2, true, true, "nvme"},
                    Group{"DiskAlone", {"store.mid_apply"}, 2, 1, true, true, "nvme"}),
    [](const testing::TestParamInfo<Group>& info) { return info.param.name; });

}  // namespace
}  // namespace zeroshard::cluster
