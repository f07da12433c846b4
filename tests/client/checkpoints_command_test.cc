// zeroshard checkpoints, and checkpoints verify.
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/checkpoint/state_digest.h"
#include "common/checkpoint/store.h"
#include "common/exit_codes.h"
#include "common/plan/model_table.h"
#include "common/spec/job_spec.h"
#include "tests/client/command_fixture.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class CheckpointsCommandTest : public CommandTest {
 protected:
  CheckpointsCommandTest() {
    absl::StatusOr<v1::JobSpec> spec = ParseJobSpec(kJob, "job", {});
    EXPECT_TRUE(spec.ok()) << spec.status();
    spec_ = *spec;
    EXPECT_TRUE(NormaliseJobSpec(&spec_).ok());
    model_ = MakeModelTable(spec_.model()).value();
  }

  // Steps 1 and 2, with all that training saves. `spoil` changes the second before it is complete.
  std::string MakeCheckpoints(
      const std::function<void(std::vector<StatePiece>*, Manifest*)>& spoil = nullptr) {
    CheckpointStoreOptions options;
    options.dir = (folder_ / "checkpoints").string();
    options.job = options.run_id = "tiny";
    const auto store = CheckpointStore::Open(&FileSystem::Real(), options);
    EXPECT_TRUE(store.ok()) << store.status();
    for (const uint64_t step : {1, 2}) {
      const auto folder = (*store)->Begin(step);
      EXPECT_TRUE(folder.ok()) << folder.status();
      Manifest manifest;
      manifest.job = manifest.run_id = "tiny";
      manifest.step = step;
      manifest.world_size = 1;
      manifest.spec = spec_;
      std::deque<std::vector<float>> flats;  // of each kind and unit
      std::vector<StatePiece> pieces;
      for (int i = 0; i < kStateKinds; ++i) {
        const auto kind = static_cast<StateKind>(i);
        WeightDigest digest;
        for (size_t u = 0; u < model_.units.size(); ++u) {
          const UnitTable& unit = model_.units[u];
          std::vector<float>& flat = flats.emplace_back(static_cast<size_t>(unit.length), 0.0f);
          for (const ParameterInfo& p : unit.parameters) {
            float* at = flat.data() + p.offset;
            for (int64_t e = 0; e < p.size; ++e) at[e] = static_cast<float>(e % 1000 + i);
            pieces.push_back({kind, p.name, p.shape, 0, p.size, at});
          }
          digest.Add(u, 0, flat);
        }
        manifest.digests[i] = digest.Hex();
      }
      if (step == 2 && spoil != nullptr) spoil(&pieces, &manifest);
      const auto file = WriteStateFile(&FileSystem::Real(), *folder, 0, 1, pieces);
      EXPECT_TRUE(file.ok()) << file.status();
      manifest.files = {*file};
      const auto path = (*store)->Complete(manifest);
      EXPECT_TRUE(path.ok()) << path.status();
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

  v1::JobSpec spec_;
  ModelTable model_;
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

// Every checksum is right, and still loading would refuse it.
TEST_F(CheckpointsCommandTest, VerifyFindsWhatChecksumsDoNotSee) {
  using Pieces = std::vector<StatePiece>;
  const float other = 0.25f;
  struct Case {
    std::function<void(Pieces*, Manifest*)> spoil;
    const char* says;
  };
  const Case cases[] = {
      {[&](Pieces* pieces, Manifest*) {
         StatePiece& last = pieces->back();  // one value of exp_avg_sq is another's
         StatePiece changed = last;
         last.end = last.end - 1;
         changed.begin = last.end;
         changed.values = &other;
         pieces->push_back(changed);
       },
       "the values of exp_avg_sq have the digest"},
      {[](Pieces*, Manifest* manifest) { manifest->digests[0] = std::string(32, '0'); },
       "the values of master have the digest"},
      {[](Pieces* pieces, Manifest*) { pieces->pop_back(); }, "no exp_avg_sq"},
      {[](Pieces*, Manifest* manifest) { manifest->spec.mutable_model()->set_vocab_size(300); },
       "the model wants"},
      {[](Pieces*, Manifest* manifest) { manifest->spec.clear_model(); }, "model"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.says);
    const std::string dir = MakeCheckpoints(c.spoil);
    const Outcome outcome = Run({"checkpoints", "verify", dir});
    EXPECT_EQ(outcome.code, kExitFailed);
    EXPECT_THAT(outcome.out,
                AllOf(HasSubstr(dir + "/step-00000001: sound"),
                      HasSubstr(dir + "/step-00000002: NOT SOUND"), HasSubstr(c.says)));
    std::filesystem::remove_all(dir);
  }
  // What no tensor has, or was not computed, is not asked for.
  EXPECT_EQ(Run({"checkpoints", "verify",
                 MakeCheckpoints([](Pieces*, Manifest* m) { m->digests[2].clear(); })})
                .code,
            kExitOk);
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
