// zeroshard checkpoints, and checkpoints verify.
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/checkpoint/store.h"
#include "common/exit_codes.h"
#include "tests/client/command_fixture.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class CheckpointsCommandTest : public CommandTest {
 protected:
  // Steps 1 and 2, each of one tensor.
  std::string MakeCheckpoints() {
    CheckpointStoreOptions options;
    options.dir = (folder_ / "checkpoints").string();
    options.job = options.run_id = "tiny";
    const auto store = CheckpointStore::Open(&FileSystem::Real(), options);
    EXPECT_TRUE(store.ok()) << store.status();
    const std::vector<float> values(100, 1.5f);
    for (const uint64_t step : {1, 2}) {
      const auto folder = (*store)->Begin(step);
      EXPECT_TRUE(folder.ok()) << folder.status();
      const auto file = WriteStateFile(&FileSystem::Real(), *folder, 0, 1,
                                       {{StateKind::kMaster, "w", {100}, 0, 100, values.data()}});
      EXPECT_TRUE(file.ok()) << file.status();
      Manifest manifest;
      manifest.job = manifest.run_id = "tiny";
      manifest.step = step;
      manifest.world_size = 1;
      manifest.files = {*file};
      EXPECT_TRUE((*store)->Complete(manifest).ok());
    }
    return options.dir;
  }
  static void FlipLastByte(const std::string& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const int byte = file.get();
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(byte ^ 1));
  }
};

TEST_F(CheckpointsCommandTest, VerifyOfSoundOnesSaysSoAndExitsWithZero) {
  const std::string dir = MakeCheckpoints();
  const Outcome all = Run({"checkpoints", "verify", dir});
  EXPECT_EQ(all.code, kExitOk) << all.err;
  EXPECT_THAT(all.out, AllOf(HasSubstr(dir + "/step-00000001: sound, step 1"),
                             HasSubstr(dir + "/step-00000002: sound, step 2")));
  EXPECT_THAT(all.err, IsEmpty());
  const Outcome one = Run({"checkpoints", "verify", dir + "/step-00000002/"});
  EXPECT_EQ(one.code, kExitOk) << one.err;
  EXPECT_THAT(one.out, AllOf(HasSubstr("step 2"), Not(HasSubstr("step 1"))));
}

TEST_F(CheckpointsCommandTest, VerifyOfADamagedOneNamesTheFileAndFails) {
  const std::string dir = MakeCheckpoints();
  const std::string file = dir + "/step-00000002/state-00000-of-00001.safetensors";
  FlipLastByte(file);
  const Outcome outcome = Run({"checkpoints", "verify", dir, "--output", "json"});
  EXPECT_EQ(outcome.code, kExitFailed);
  const size_t line = outcome.out.find('\n') + 1;
  EXPECT_EQ(nlohmann::json::parse(outcome.out.substr(0, line))["sound"], true);
  const auto damaged = nlohmann::json::parse(outcome.out.substr(line));
  EXPECT_EQ(damaged["sound"], false);
  EXPECT_THAT(damaged["problem"].get<std::string>(), AllOf(HasSubstr(file), HasSubstr("CRC-32C")));
  ExpectOneMessage(outcome);
  EXPECT_THAT(outcome.err, HasSubstr("1 of 2 checkpoints"));
}

TEST_F(CheckpointsCommandTest, VerifyOfWhatIsNoCheckpointIsNotFound) {
  EXPECT_EQ(Run({"checkpoints", "verify", (folder_ / "none").string()}).code, kExitNotFound);
  EXPECT_EQ(Run({"checkpoints", "verify", folder_.string()}).code, kExitNotFound);
}

TEST_F(CheckpointsCommandTest, AJobsCheckpointsAreATable) {
  fake_.jobs.push_back(Job("tiny", v1::JOB_STATE_RUNNING, ""));
  EXPECT_THAT(Run({"checkpoints", "none"}).code, kExitNotFound);
  fake_.checkpoints.set_dir("/ckpt");
  EXPECT_THAT(Run({"checkpoints", "tiny"}).out, HasSubstr("no checkpoints yet in /ckpt"));
  v1::CheckpointEntry* sound = fake_.checkpoints.add_checkpoints();
  sound->set_step(50);
  sound->set_complete(true);
  sound->set_latest(true);
  sound->set_bytes(1'500'000);
  sound->set_unix_ms(absl::ToUnixMillis(absl::Now() - absl::Minutes(150)));
  v1::CheckpointEntry* broken = fake_.checkpoints.add_checkpoints();
  broken->set_step(60);
  broken->set_problem("it has no manifest.json");
  const Outcome table = Run({"checkpoints", "tiny"});
  EXPECT_EQ(table.code, kExitOk) << table.err;
  EXPECT_THAT(table.out, testing::ContainsRegex("STEP +AGE +SIZE +STATE +LATEST +PROBLEM\n"));
  EXPECT_THAT(table.out, testing::ContainsRegex("50 +2h 3[0-9]m +1.5 MB +complete +latest +-"));
  EXPECT_THAT(table.out,
              testing::ContainsRegex("60 +- +0 B +incomplete +- +it has no manifest.json"));
  const auto json = nlohmann::json::parse(Run({"checkpoints", "tiny", "--output", "json"}).out);
  EXPECT_EQ(json["dir"], "/ckpt");
  EXPECT_EQ(json["checkpoints"][1]["problem"], "it has no manifest.json");
}

TEST_F(CheckpointsCommandTest, WithoutAJobItSaysWhatIsWanted) {
  const Outcome outcome = Run({"checkpoints"});
  EXPECT_EQ(outcome.code, kExitUsage);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("checkpoints JOB"), HasSubstr("verify DIR")));
}

}  // namespace
}  // namespace zeroshard
