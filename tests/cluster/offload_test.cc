// Jobs whose state is in the shard stores, on real processes: the numbers are those of the same job
// without offload, whatever dies.
#include <signal.h>

#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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

// --- the same numbers -----------------------------------------------------------------------

struct Case {
  const char* name;
  const char* model;  // gpt2 | llama
  int stage;
  bool parameters;  // offloaded too
  bool bf16;
  int stores;
  int replicas;
  int batch;  // 4: one round of micro-batches; 8: two, accumulated
  const char* device = "cpu";
  bool clipping = true;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class SameNumbers : public OffloadTest, public testing::WithParamInterface<Case> {};

TEST_P(SameNumbers, AsWithoutOffload) {
  const Case& c = GetParam();
  std::vector<std::string> args = Model(c.model);
  const std::vector<std::string> common = {
      "--set", absl::StrCat("zero_optimization.stage=", c.stage),
      "--set", absl::StrCat("bf16.enabled=", c.bf16 ? "true" : "false"),
      "--set", absl::StrCat("train_batch_size=", c.batch),
      "--set", absl::StrCat("gradient_clipping=", c.clipping ? "1.0" : "0"),
      "--set", "deterministic=true",
      "--set", "steps=12",
      "--set", "eval={data: [text.txt], interval_steps: 5, batches: 1}"};
  args.insert(args.end(), common.begin(), common.end());
  const Result without = Train("without", args);
  const std::vector<std::string> offload = Offload(c.stores, c.replicas, c.parameters, c.device);
  args.insert(args.end(), offload.begin(), offload.end());
  const Result with = Train("with", args);
  EXPECT_EQ(with.history, without.history);
  EXPECT_EQ(with.history.size(), 12u);
  EXPECT_FALSE(without.digest.empty());
  EXPECT_EQ(with.digest, without.digest);
  EXPECT_EQ(with.status["store_plan"]["replicas"], c.replicas);
  EXPECT_EQ(with.status["steps_lost"], 0);
}

INSTANTIATE_TEST_SUITE_P(
    Offload, SameNumbers,
    testing::Values(Case{"Gpt2Stage1", "gpt2", 1, false, true, 1, 1, 8},
                    Case{"Gpt2Stage2Fp32Replicas", "gpt2", 2, false, false, 3, 2, 4},
                    Case{"Gpt2Stage3ThreeStores", "gpt2", 3, false, true, 3, 1, 8},
                    Case{"Gpt2Stage3ParametersReplicas", "gpt2", 3, true, true, 3, 2, 8},
                    Case{"LlamaStage1Fp32Replicas", "llama", 1, false, false, 3, 2, 4},
                    Case{"LlamaStage2", "llama", 2, false, true, 1, 1, 8},
                    Case{"LlamaStage3ParametersFp32", "llama", 3, true, false, 1, 1, 8},
                    Case{"LlamaStage3Replicas", "llama", 3, false, true, 3, 2, 4},
                    Case{"Gpt2Stage2Nvme", "gpt2", 2, false, true, 2, 1, 8, "nvme"},
                    Case{"Gpt2Stage3Fp32NvmeReplicas", "gpt2", 3, true, false, 3, 2, 4, "nvme"},
                    Case{"LlamaStage3ParametersNvme", "llama", 3, true, true, 1, 1, 8, "nvme"},
                    Case{"LlamaStage1Nvme", "llama", 1, false, true, 1, 1, 4, "nvme"},
                    Case{"Gpt2Stage3ThreeStoresNvme", "gpt2", 3, false, true, 3, 1, 8, "nvme"},
                    Case{"Gpt2Stage2WithoutClipping", "gpt2", 2, false, true, 2, 1, 8, "cpu",
                         /*clipping=*/false},
                    Case{"LlamaStage3Fp32NvmeWithoutClipping", "llama", 3, true, false, 2, 1, 4,
                         "nvme", /*clipping=*/false}),
    [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

// Units of 1.2 million elements have two chunks, and the chunks of one are on several stores.
TEST_F(OffloadTest, AUnitOfSeveralChunksHasTheSameNumbers) {
  std::vector<std::string> args = {
      "--set", "model.hidden_size=320", "--set", "model.heads=4", "--set", "steps=4",
      "--set", "bf16.enabled=true"};
  const Result without = Train("without", args);
  const std::vector<std::string> offload = Offload(3, 1, /*parameters=*/true);
  args.insert(args.end(), offload.begin(), offload.end());
  const Result with = Train("with", args);
  EXPECT_EQ(with.history, without.history);
  EXPECT_EQ(with.digest, without.digest);
  EXPECT_GE(with.status["store_plan"]["chunks"], 6);
}

// --- processes that die ---------------------------------------------------------------------

TEST_F(OffloadTest, AKilledWorkerCostsNoStep) {
  const Result wanted = Undisturbed(Endurance(1, 1));
  const auto local = StartJson("w", Endurance(1, 1));
  ASSERT_TRUE(AwaitSteps("w", 5, local.get()));
  ASSERT_EQ(kill(PidOf("w", "worker-1"), SIGKILL), 0);
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_EQ(seen.status["steps_lost"], 0);
  EXPECT_GE(seen.status["generation"], 2);
  EXPECT_TRUE(SawState(*local, "RECOVERING")) << local->Out();
}

TEST_F(OffloadTest, RankZeroToo) {
  const Result wanted = Undisturbed(Endurance(1, 1, /*parameters=*/true));
  const auto local = StartJson("w", Endurance(1, 1, /*parameters=*/true));
  ASSERT_TRUE(AwaitSteps("w", 5, local.get()));
  const std::string zero = MemberOfRank("w", 0);
  ASSERT_FALSE(zero.empty());
  ASSERT_EQ(kill(PidOf("w", zero), SIGKILL), 0);
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_EQ(seen.status["steps_lost"], 0);
}

TEST_F(OffloadTest, AKilledCoordinatorCostsNoStep) {
  const Result wanted = Undisturbed(Endurance(2, 1));
  const auto local = StartJson("w", Endurance(2, 1));
  ASSERT_TRUE(AwaitSteps("w", 5, local.get()));
  ASSERT_EQ(kill(PidOf("w", "coordinator"), SIGKILL), 0);
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_EQ(seen.status["steps_lost"], 0);
}

TEST_F(OffloadTest, AKilledStoreCostsNoStepWhereChunksAreOnTwo) {
  const Result wanted = Undisturbed(Endurance(3, 2));
  const auto local = StartJson("w", Endurance(3, 2));
  ASSERT_TRUE(AwaitSteps("w", 5, local.get()));
  ASSERT_EQ(kill(PidOf("w", "store-1"), SIGKILL), 0);
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_EQ(seen.status["steps_lost"], 0);
  EXPECT_TRUE(SawState(*local, "RECOVERING")) << local->Out();
}

TEST_F(OffloadTest, WithoutAnotherCopyTheJobGoesBackToItsCheckpointAndSaysWhatThatCost) {
  const Result wanted = Undisturbed(Endurance(2, 1));
  std::vector<std::string> args = Endurance(2, 1);
  args.insert(args.end(), {"--set", "checkpoint={dir: ckpt, interval_steps: 10}"});
  const auto local = StartJson("w", args);
  ASSERT_TRUE(AwaitSteps("w", 14, local.get()));
  ASSERT_TRUE(Eventually(kPatience, [&] { return fs::exists(Checkpoint("w", 10)); }));
  ASSERT_EQ(kill(PidOf("w", "store-0"), SIGKILL), 0);
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_GE(seen.status["version"]["epoch"], 2);
  const int lost = seen.status["steps_lost"];
  EXPECT_THAT(lost, Ge(1)) << local->Out();
  EXPECT_EQ(seen.steps_lost, seen.status["steps_lost"]);
  EXPECT_THAT(local->Out(), HasSubstr("step"));
  ExpectSound(WorkPath("w", "ckpt/small"));
}

TEST_F(OffloadTest, WithoutAnyCheckpointItBeginsAnew) {
  const Result wanted = Undisturbed(Endurance(1, 1));
  const auto local = StartJson("w", Endurance(1, 1));
  ASSERT_TRUE(AwaitSteps("w", 5, local.get()));
  ASSERT_EQ(kill(PidOf("w", "store-0"), SIGKILL), 0);
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_GE(seen.status["steps_lost"], 5);
  EXPECT_EQ(Json::parse(History("w").front())["steps_lost"], seen.status["steps_lost"]);
  EXPECT_EQ(seen.steps_lost, seen.status["steps_lost"]);
}

TEST_F(OffloadTest, AStoreThenTheCoordinatorThenAWorkerCostNoStep) {
  const Result wanted = Undisturbed(Endurance(3, 2, /*parameters=*/true));
  const auto local = StartJson("w", Endurance(3, 2, /*parameters=*/true));
  size_t steps = 5;
  for (const char* victim : {"store-0", "coordinator", "worker-0"}) {
    ASSERT_TRUE(AwaitSteps("w", steps, local.get())) << victim;
    ASSERT_EQ(kill(PidOf("w", victim), SIGKILL), 0) << victim;
    steps = History("w").size() + 10;
  }
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_EQ(seen.status["steps_lost"], 0);
}

// --- the rest -------------------------------------------------------------------------------

TEST_F(OffloadTest, AJobThatDoesNotFitIsRefusedWithTheNumbers) {
  // 15 million elements, of 16 bytes each, on both; a process takes more than 40 MiB itself.
  std::vector<std::string> args = Offload(2, 2, false);
  args.insert(args.end(), {"--set", "model.hidden_size=640", "--set", "model.layers=3", "--set",
                           "model.heads=4", "--store-memory", "200MiB"});
  const auto local = StartLocal("w", args);
  EXPECT_NE(local->Wait(kPatience), 0);
  EXPECT_THAT(local->Err(), AllOf(HasSubstr("does not fit"), HasSubstr("on 2 stores"),
                                  HasSubstr("--memory-limit")));
  EXPECT_TRUE(History("w").empty());
}

TEST_F(OffloadTest, AStoreWhoseLimitItTakesItselfDoesNotStartAndSaysSo) {
  std::vector<std::string> args = Offload(1, 1, false);
  args.insert(args.end(), {"--store-memory", "1MiB"});
  const auto local = StartLocal("w", args);
  EXPECT_NE(local->Wait(kPatience), 0);
  EXPECT_THAT(ReadText(WorkPath("w", "logs/store-0.log")),
              AllOf(HasSubstr("--memory-limit 1048576 bytes"), HasSubstr("at its start")));
}

TEST_F(OffloadTest, StatusAndNodesShowWhereTheStateIs) {
  const auto local = StartLocal("w", Endless(Offload(3, 2, false)));
  ASSERT_TRUE(AwaitSteps("w", 3, local.get()));
  const std::string coordinator = AddressOf("w", "coordinator");
  const Json status = Json::parse(
      Run({"status", "small", "--output", "json", "--coordinator", coordinator})->Out());
  ASSERT_EQ(status["stores"].size(), 3u);
  uint64_t chunks = 0, master = 0;
  for (const Json& store : status["stores"]) {
    chunks += store["usage"]["chunks"].get<uint64_t>();
    master += store["usage"]["master_bytes"].get<uint64_t>();
    EXPECT_GE(store["version"]["step"], 2) << store;
  }
  EXPECT_EQ(chunks, 2 * status["store_plan"]["chunks"].get<uint64_t>());
  EXPECT_GT(master, 0u);
  EXPECT_THAT(Run({"status", "small", "--coordinator", coordinator})->Out(),
              AllOf(HasSubstr("store-2"), HasSubstr("in stores"), HasSubstr("PUSH/STEP")));

  const Json nodes =
      Json::parse(Run({"nodes", "--output", "json", "--coordinator", coordinator})->Out());
  int stores = 0;
  for (const Json& node : nodes["nodes"]) {
    if (node["hello"]["kind"] != "STORE") continue;
    ++stores;
    EXPECT_EQ(node["jobs"], 1);
    EXPECT_GT(node["reserved_bytes"], 0);
    EXPECT_LE(node["reserved_bytes"], node["hello"]["memory_bytes"]);
  }
  EXPECT_EQ(stores, 3);
  local->Signal(SIGKILL);
}

TEST_F(OffloadTest, CancelledWithSaveItGoesOnWithoutOffloadAndBack) {
  std::vector<std::string> args = Endless(Offload(2, 1, false));
  args.insert(args.end(), {"--set", "checkpoint={dir: ckpt, interval_steps: 100000}", "--set",
                           "deterministic=true"});
  auto local = StartLocal("w", args);
  ASSERT_TRUE(AwaitSteps("w", 7, local.get()));
  const auto cancel =
      Run({"cancel", "small", "--save", "--coordinator", AddressOf("w", "coordinator")});
  EXPECT_EQ(cancel->Wait(kPatience), 0) << cancel->Err();
  EXPECT_EQ(local->Wait(kPatience), 1);
  EXPECT_THAT(local->Err(), HasSubstr("CANCELLED"));
  const int done = static_cast<int>(History("w").size());
  ASSERT_TRUE(fs::exists(Checkpoint("w", done))) << done;
  ExpectSound(WorkPath("w", "ckpt/small"));

  // The state that the stores saved is that of the same job which never had any.
  const std::vector<std::string> on = {"--set", absl::StrCat("steps=", done + 10),
                                       "--set", "scheduler.params.total_steps=100000",
                                       "--set", "deterministic=true",
                                       "--set", "checkpoint={dir: ckpt, interval_steps: 100000}"};
  const Result wanted = Train("undisturbed", on);
  const Result without = Train("w", on);
  EXPECT_EQ(without.history, wanted.history);
  EXPECT_EQ(without.digest, wanted.digest);
}

TEST_F(OffloadTest, ASignalLetsTheStoresSaveAndTheNextRunLosesNoStep) {
  std::vector<std::string> args = Endurance(1, 1, true);
  args.insert(args.end(), {"--set", "checkpoint={dir: ckpt}"});
  const Result wanted = Undisturbed(args);
  auto local = StartLocal("w", args);
  ASSERT_TRUE(AwaitSteps("w", 7, local.get()));
  local->Signal(SIGTERM);
  EXPECT_EQ(local->Wait(kPatience), 128 + SIGTERM) << local->Err();
  EXPECT_THAT(local->Out(), HasSubstr("writing a checkpoint"));
  const int done = static_cast<int>(History("w").size());
  EXPECT_TRUE(fs::exists(Checkpoint("w", done))) << done;
  const Result seen = Train("w", args);
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
}

}  // namespace
}  // namespace zeroshard::cluster
