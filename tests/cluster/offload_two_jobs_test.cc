// Two offloaded jobs at once on the same stores.
#include <signal.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/cluster/offload_fixture.h"

namespace zeroshard::cluster {
namespace {

using Json = nlohmann::ordered_json;

class TwoJobs : public OffloadTest {
 protected:
  std::vector<std::string> Lines(const std::string& workdir, const std::string& job) const {
    return absl::StrSplit(ReadText(WorkPath(workdir, absl::StrCat("jobs/", job, "/history.jsonl"))),
                          '\n', absl::SkipEmpty());
  }
  // On how many stores there are that many jobs.
  int StoresWith(int jobs, const std::string& coordinator) {
    const auto nodes = Run({"nodes", "--output", "json", "--coordinator", coordinator});
    const Json json = Json::parse(nodes->Out(), nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) return 0;
    int stores = 0;
    for (const Json& node : json["nodes"])
      stores += node["hello"]["kind"] == "STORE" && node["jobs"] == jobs;
    return stores;
  }
};

// One on the disks of two stores, one in their memory; other models, precisions and seeds.
TEST_F(TwoJobs, OnTheSameStoresHaveTheNumbersOfEachAlone) {
  std::vector<std::string> disk = Offload(2, 2, /*parameters=*/true, "nvme");
  disk.insert(disk.end(),
              {"--set", "resources.workers=1", "--set", "bf16.enabled=true", "--set", "steps=100"});
  const std::vector<std::string> sets = {
      "--set", "zero_optimization.offload_optimizer={device: cpu}",
      "--set", "store={replicas: 2}",
      "--set", "resources.workers=1",
      "--set", "steps=60",
      "--set", "seed=11"};
  std::vector<std::string> memory = {"--stores", "2"};
  memory.insert(memory.end(), sets.begin(), sets.end());
  const std::vector<std::string> llama = Model("llama");
  memory.insert(memory.end(), llama.begin(), llama.end());
  const Result disk_alone = Train("disk", disk);
  const Result memory_alone = Train("memory", memory);
  EXPECT_NE(disk_alone.digest, memory_alone.digest);

  const auto local = StartJson("both", disk);
  ASSERT_TRUE(AwaitSteps("both", 3, local.get()));
  const std::string coordinator = AddressOf("both", "coordinator");
  // Stands still so that the cluster stays when its own job is over; the daemons go on.
  local->Signal(SIGSTOP);
  // The first job waits for the second to begin.
  const std::string rank = MemberOfRank("both", 0);
  ASSERT_FALSE(rank.empty());
  const pid_t worker = PidOf("both", rank);
  ASSERT_EQ(kill(worker, SIGSTOP), 0);
  std::vector<std::string> submit = {program_,    "submit", job_,        "--coordinator",
                                     coordinator, "--set",  "name=other"};
  submit.insert(submit.end(), sets.begin(), sets.end());
  submit.insert(submit.end(), llama.begin(), llama.end());
  submit.push_back("--wait");
  Process other(submit, folder_ + "/submit");
  ASSERT_TRUE(Eventually(kPatience, [&] { return !Lines("both", "other").empty(); }))
      << other.Out() << other.Err();
  const size_t done = History("both").size();
  EXPECT_LT(done, disk_alone.history.size()) << "the first was over before the second began";
  EXPECT_EQ(StoresWith(2, coordinator), 2);
  ASSERT_EQ(kill(worker, SIGCONT), 0);
  EXPECT_TRUE(Eventually(kPatience, [&] { return History("both").size() > done; }))
      << "the first waits for the second";
  EXPECT_EQ(other.Wait(kPatience), 0) << other.Out() << other.Err();
  const auto status = Run({"status", "other", "--output", "json", "--coordinator", coordinator});
  const Json of_other = Json::parse(status->Out(), nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(of_other.is_object()) << status->Out() << status->Err();
  EXPECT_EQ(WithoutCosts(Lines("both", "other")), memory_alone.history);
  EXPECT_EQ(of_other["weights_digest"], memory_alone.digest);
  EXPECT_EQ(of_other["generation"], 1);

  local->Signal(SIGCONT);
  const Result seen = Finish("both", local.get());
  EXPECT_EQ(seen.history, disk_alone.history);
  EXPECT_EQ(seen.digest, disk_alone.digest);
  EXPECT_EQ(seen.status["steps_lost"], 0);
}

}  // namespace
}  // namespace zeroshard::cluster
