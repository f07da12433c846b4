// Checkpoints of real processes: killed, stopped and cancelled jobs go on where they were.
#include <signal.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/cluster/local_fixture.h"

namespace zeroshard::cluster {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Json = nlohmann::ordered_json;

class CheckpointTest : public LocalTest {
 protected:
  std::vector<std::string> With(std::vector<std::string> more = {}, int steps = 40) {
    std::vector<std::string> args = {"--set", "checkpoint={dir: ckpt, interval_steps: 5}",
                                     "--set", absl::StrCat("steps=", steps),
                                     "--set", "scheduler.params.total_steps=40"};
    args.insert(args.end(), more.begin(), more.end());
    return args;
  }
  std::string Checkpoints(const std::string& workdir) const {
    return WorkPath(workdir, "ckpt/small");
  }
  std::string Step(const std::string& workdir, int step) const {
    return absl::StrCat(Checkpoints(workdir), absl::StrFormat("/step-%08d", step));
  }
  bool AwaitCheckpoint(const std::string& workdir, int step) {
    return Eventually(kPatience,
                      [&] { return fs::exists(Step(workdir, step) + "/manifest.json"); });
  }
  // The history of a run that nothing disturbed.
  std::vector<std::string> Undisturbed() {
    const auto local = StartLocal("undisturbed", With());
    EXPECT_EQ(local->Wait(kPatience), 0) << local->Err();
    return WithoutCosts(History("undisturbed"));
  }
  void ExpectSound(const std::string& checkpoint) {
    const auto verify = Run({"checkpoints", "verify", checkpoint});
    EXPECT_EQ(verify->Wait(kPatience), 0) << verify->Err();
  }
};

TEST_F(CheckpointTest, KilledWholeItGoesOnAndTheHistoryIsTheUndisturbedOnes) {
  auto local = StartLocal("w", With({}, 100000));
  ASSERT_TRUE(AwaitCheckpoint("w", 10));
  const std::vector<pid_t> pids = AllPids("w");
  local->Signal(SIGKILL);
  local->Wait(kPatience);
  ExpectAllGone(pids);

  local = StartLocal("w", With());
  ASSERT_EQ(local->Wait(kPatience), 0) << local->Err();
  EXPECT_THAT(local->Out(), HasSubstr("going on from "));
  EXPECT_EQ(WithoutCosts(History("w")), Undisturbed());
  ExpectSound(Checkpoints("w"));
}

TEST_F(CheckpointTest, ASignalLetsTheJobSaveAndTheNextRunLosesNoStep) {
  auto local = StartLocal("w", With({}, 100000));
  ASSERT_TRUE(AwaitSteps("w", 7, local.get()));
  local->Signal(SIGTERM);
  EXPECT_EQ(local->Wait(kPatience), 128 + SIGTERM) << local->Err();
  EXPECT_THAT(local->Out(), HasSubstr("writing a checkpoint"));
  const size_t done = History("w").size();
  EXPECT_TRUE(fs::exists(Step("w", static_cast<int>(done)) + "/manifest.json")) << done;
  EXPECT_THAT(local->Err(), HasSubstr(absl::StrCat("step ", done)));

  if (done >= 40) GTEST_SKIP() << "too fast to be interrupted in time";
  local = StartLocal("w", With());
  ASSERT_EQ(local->Wait(kPatience), 0) << local->Err();
  EXPECT_EQ(WithoutCosts(History("w")), Undisturbed());
}

TEST_F(CheckpointTest, CancelWithSaveWritesOne) {
  const auto local = StartLocal("w", With({}, 100000));
  ASSERT_TRUE(AwaitSteps("w", 7, local.get()));
  const std::string coordinator = AddressOf("w", "coordinator");
  const auto cancel = Run({"cancel", "small", "--save", "--coordinator", coordinator});
  EXPECT_EQ(cancel->Wait(kPatience), 0) << cancel->Err();
  EXPECT_EQ(local->Wait(kPatience), 1);
  EXPECT_THAT(local->Err(), HasSubstr("CANCELLED"));
  const int done = static_cast<int>(History("w").size());
  EXPECT_TRUE(fs::exists(Step("w", done) + "/manifest.json")) << done;
  EXPECT_THAT(local->Err(), HasSubstr(absl::StrCat(done)));
}

TEST_F(CheckpointTest, AWorkerThatIsAskedToLeaveLetsTheJobSaveFirst) {
  const auto local = StartLocal("w", With({}, 100000));
  ASSERT_TRUE(AwaitSteps("w", 7, local.get()));
  ASSERT_EQ(kill(PidOf("w", "worker-1"), SIGTERM), 0);
  std::string events;
  ASSERT_TRUE(Eventually(kPatience, [&] {
    const auto status = Run(
        {"status", "small", "--output", "json", "--coordinator", AddressOf("w", "coordinator")});
    status->Wait(kPatience);
    events = status->Out();
    return absl::StrContains(events, "; 0 steps are lost") || local->Ended();
  })) << events;
  EXPECT_THAT(events, HasSubstr("told to leave (SIGTERM); saved step "));
  EXPECT_THAT(events, HasSubstr("rank 1 (worker-1 on "));
  const size_t done = History("w").size();
  EXPECT_TRUE(AwaitSteps("w", done + 3, local.get()));
  local->Signal(SIGKILL);
}

TEST_F(CheckpointTest, AnotherWorldSizeAndStageGoesOnWithTheSameNumbers) {
  const std::vector<std::string> same = {"--set", "deterministic=true"};
  auto local = StartLocal("a", With(same));
  ASSERT_EQ(local->Wait(kPatience), 0) << local->Err();
  const std::vector<std::string> wanted = WithoutCosts(History("a"));

  local = StartLocal("b", With({"--set", "deterministic=true"}, 20));
  ASSERT_EQ(local->Wait(kPatience), 0) << local->Err();
  local = StartLocal("b", With({"--set", "deterministic=true", "--set", "resources.workers=1",
                                "--set", "zero_optimization.stage=1"}));
  ASSERT_EQ(local->Wait(kPatience), 0) << local->Err();
  EXPECT_EQ(WithoutCosts(History("b")), wanted);
}

TEST_F(CheckpointTest, AFinishedJobSaysSoAndFreshStartsAnew) {
  auto local = StartLocal("w", With({}, 10));
  ASSERT_EQ(local->Wait(kPatience), 0) << local->Err();
  const std::vector<std::string> history = WithoutCosts(History("w"));
  local = StartLocal("w", With({}, 10));
  EXPECT_EQ(local->Wait(kPatience), 0) << local->Err();
  EXPECT_THAT(local->Out(), AllOf(HasSubstr("step 10 of 10"), HasSubstr("--fresh")));
  local = StartLocal("w", With({"--fresh"}, 10));
  ASSERT_EQ(local->Wait(kPatience), 0) << local->Err();
  EXPECT_EQ(WithoutCosts(History("w")), history);
}

TEST_F(CheckpointTest, OldOnesGoAndTheListSaysWhatIsThere) {
  const auto local = StartLocal(
      "w", With({"--set", "checkpoint.keep_last=1", "--set", "checkpoint.keep_every=20"}, 100000));
  ASSERT_TRUE(AwaitCheckpoint("w", 30));
  ASSERT_TRUE(Eventually(kPatience, [&] { return !fs::exists(Step("w", 25)); }));
  EXPECT_TRUE(fs::exists(Step("w", 20)));
  const auto list = Run(
      {"checkpoints", "small", "--output", "json", "--coordinator", AddressOf("w", "coordinator")});
  EXPECT_EQ(list->Wait(kPatience), 0) << list->Err();
  const Json answer = Json::parse(list->Out());
  ASSERT_FALSE(answer["checkpoints"].empty()) << list->Out();
  EXPECT_EQ(answer["checkpoints"][0]["step"], 20);
  EXPECT_EQ(answer["checkpoints"][0]["complete"], true);
}

TEST_F(CheckpointTest, AMissingFileIsNamedAndNothingStarts) {
  auto local = StartLocal("w", With({}, 10));
  ASSERT_EQ(local->Wait(kPatience), 0) << local->Err();
  const std::string file = Step("w", 10) + "/state-00001-of-00002.safetensors";
  ASSERT_TRUE(fs::remove(file));
  EXPECT_NE(Run({"checkpoints", "verify", Step("w", 10)})->Wait(kPatience), 0);
  local = StartLocal("v", With({"--resume-from", Step("w", 10)}, 20));
  EXPECT_NE(local->Wait(kPatience), 0);
  EXPECT_THAT(local->Err(), HasSubstr("state-00001-of-00002.safetensors"));
  // The folder's newest complete one serves, and what was skipped is said.
  local = StartLocal("v", With({"--resume-from", Checkpoints("w")}, 20));
  EXPECT_EQ(local->Wait(kPatience), 0) << local->Err();
  EXPECT_EQ(Json::parse(History("v").front())["step"], 6);
}

TEST_F(CheckpointTest, WhatWasTrainedIsExportedAndSpeaks) {
  const auto local = StartLocal(
      "w", With({"--set", "sample={interval_steps: 10, prompts: ['line '], max_tokens: 8}", "--set",
                 "eval={data: [text.txt], interval_steps: 10, batches: 2}"}));
  ASSERT_EQ(local->Wait(kPatience), 0) << local->Err();
  EXPECT_THAT(local->Out(), AllOf(HasSubstr("step 10: line "), HasSubstr("eval ")));
  EXPECT_TRUE(Json::parse(History("w")[9])["eval_loss"].is_number());
  EXPECT_FALSE(Json::parse(History("w")[8]).contains("eval_loss"));

  const std::string model = folder_ + "/model";
  const auto exported = Run({"export", Checkpoints("w"), model, "--dtype", "fp32"});
  EXPECT_EQ(exported->Wait(kPatience), 0) << exported->Err();
  EXPECT_TRUE(fs::exists(model + "/config.json"));
  EXPECT_TRUE(fs::exists(model + "/model.safetensors"));

  const std::vector<std::string> prompt = {"--prompt", "line ", "--max-tokens", "8"};
  std::vector<std::string> command = {"generate", "--model", Checkpoints("w")};
  command.insert(command.end(), prompt.begin(), prompt.end());
  const auto generated = Run(command);
  EXPECT_EQ(generated->Wait(kPatience), 0) << generated->Err();
  EXPECT_THAT(generated->Out(), HasSubstr("line "));

  // And back in: training goes on from the exported weights.
  const auto again = StartLocal(
      "again", {"--set", absl::StrCat("model={init_from: '", model, "', sequence_length: 32}"),
                "--set", "steps=2"});
  ASSERT_EQ(again->Wait(kPatience), 0) << again->Err();
  const double loss = Json::parse(History("again").front())["loss"];
  const double trained = Json::parse(History("w").back())["loss"];
  EXPECT_NEAR(loss, trained, 0.5);
}

// Peak resident memory of a process so far, in bytes.
uint64_t PeakMemory(pid_t pid) {
  const std::string status = ReadText(absl::StrCat("/proc/", pid, "/status"));
  const size_t at = status.find("VmHWM:");
  if (at == std::string::npos) return 0;
  return std::stoull(status.substr(at + 6)) * 1024;
}

// 12 blocks of 3.15 M parameters: the folder is 151 MB in fp32, a rank's share of a unit 6.3 MB.
TEST_F(CheckpointTest, AModelIsLoadedWithinAShareAndOneUnit) {
  const std::vector<std::string> model = {
      "--set", "model.hidden_size=512", "--set", "model.layers=12",
      "--set", "model.heads=8",         "--set", "train_batch_size=4",
      "--set", "steps=100000",          "--set", "checkpoint={dir: ckpt, interval_steps: 2}"};
  const auto peak = [&](const std::string& workdir, const std::vector<std::string>& args) {
    const auto local = StartLocal(workdir, args);
    EXPECT_TRUE(AwaitCheckpoint(workdir, 2)) << local->Err();
    const uint64_t bytes = PeakMemory(PidOf(workdir, "worker-0"));
    local->Signal(SIGINT);
    local->Wait(kPatience);
    return bytes;
  };
  const uint64_t fresh = peak("a", model);
  ASSERT_GT(fresh, 0u);
  const std::string folder = folder_ + "/model";
  ASSERT_EQ(Run({"export", Checkpoints("a"), folder, "--dtype", "fp32"})->Wait(kPatience), 0);

  std::vector<std::string> from_folder = model;
  for (size_t i = 0; i < 6; i += 2) from_folder[i + 1] = "seed=1";
  from_folder[1] = absl::StrCat("model={init_from: '", folder, "', sequence_length: 32}");
  const uint64_t loaded = peak("b", from_folder);
  ASSERT_GT(loaded, 0u);
  constexpr uint64_t kUnit = 3'150'000 * 4;
  constexpr uint64_t kSlack = 16 << 20;  // what any two runs of a process differ by
  EXPECT_LE(loaded, fresh + kUnit + kSlack) << "fresh " << fresh;
}

}  // namespace
}  // namespace zeroshard::cluster
