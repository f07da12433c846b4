// Jobs on meshes of real processes: the numbers are those of one worker, and a worker killed
// anywhere in the mesh costs the steps since the newest checkpoint and no bit.
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster/offload_fixture.h"
#include "tests/cluster/pods_fixture.h"

namespace zeroshard::cluster {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;
using Strings = std::vector<std::string>;

Strings Joined(Strings a, const Strings& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Strings Mesh(const std::string& parallel) {
  return {"--set", absl::StrCat("parallel={", parallel, "}")};
}

// Weights by name, of a folder that was exported in fp32.
std::map<std::string, std::vector<float>> Weights(const std::string& folder) {
  const std::string file = ReadText(folder + "/model.safetensors");
  uint64_t length = 0;
  if (file.size() < sizeof(length)) return {};
  std::memcpy(&length, file.data(), sizeof(length));
  const Json header = Json::parse(file.substr(sizeof(length), length), nullptr, false);
  std::map<std::string, std::vector<float>> weights;
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    EXPECT_EQ(tensor["dtype"], "F32");
    const uint64_t begin = tensor["data_offsets"][0], end = tensor["data_offsets"][1];
    std::vector<float>& values = weights[name];
    values.resize((end - begin) / sizeof(float));
    std::memcpy(values.data(), file.data() + sizeof(length) + length + begin, end - begin);
  }
  return weights;
}

class MeshTest : public OffloadTest {
 protected:
  Result TrainOn(int workers, const std::string& workdir, const Strings& args) {
    workers_ = workers;
    return Train(workdir, args);
  }
  std::map<std::string, std::vector<float>> Exported(const std::string& workdir) {
    const std::string folder = folder_ + "/model-" + workdir;
    const auto exported =
        Run({"export", WorkPath(workdir, "ckpt/small"), folder, "--dtype", "fp32"});
    EXPECT_EQ(exported->Wait(kPatience), 0) << exported->Err();
    return Weights(folder);
  }
  // A pipeline changes no bit of what its data line computes without one.
  void ExpectAsWithoutPipeline(int stages, const std::string& parallel, const Strings& args) {
    const Result wanted = TrainOn(1, "one", args);
    const Result seen = TrainOn(stages, "pipeline", Joined(args, Mesh(parallel)));
    EXPECT_EQ(seen.history, wanted.history);
    EXPECT_EQ(seen.digest, wanted.digest);
    EXPECT_FALSE(seen.digest.empty());
  }
};

TEST_F(MeshTest, APipelineTrainsBitForBitWhatOneWorkerTrains) {
  ExpectAsWithoutPipeline(2, "pipeline: 2", {});
}

TEST_F(MeshTest, SoDoesAnInterleavedOneOfALlama) {
  ExpectAsWithoutPipeline(2, "pipeline: 2, virtual_stages: 2",
                          Joined(Model("llama"), {"--set", "zero_optimization={stage: 1}"}));
}

TEST_F(MeshTest, TensorRanksAloneTrainWhatOneWorkerTrains) {
  const Strings job = {"--set", "steps=4", "--set", "optimizer.params.eps=1.0e-3"};
  const Result one = TrainOn(1, "one", job);
  const Result seen = TrainOn(2, "tensor", Joined(job, Mesh("tensor: 2")));
  ASSERT_EQ(seen.history.size(), one.history.size());
  ASSERT_FALSE(one.history.empty());
  for (size_t step = 0; step < one.history.size(); ++step) {
    const double wanted = Json::parse(one.history[step] + "}")["loss"];
    EXPECT_NEAR(Json::parse(seen.history[step] + "}")["loss"].get<double>(), wanted,
                1e-5 * std::max(1.0, wanted));
  }
  EXPECT_EQ(seen.status["mesh"]["tensor"], 2);
}

// A vocabulary that the tensor ranks do not divide, and grouped queries of which two ranks share
// the heads would need four tensor ranks: worker/train's tests have them.
TEST_F(MeshTest, AllThreeDimensionsTrainWhatOneWorkerTrains) {
  // A large eps keeps Adam from making steps of rounding errors, where a gradient is nothing else.
  const Strings job = {"--set", "model.vocab_size=257",        "--set", "steps=8",
                       "--set", "optimizer.params.eps=1.0e-3", "--set", "checkpoint={dir: ckpt}"};
  const Result one = TrainOn(1, "one", job);
  const Result seen = TrainOn(8, "mesh", Joined(job, Mesh("tensor: 2, pipeline: 2")));
  ASSERT_EQ(seen.history.size(), one.history.size());
  for (size_t step = 0; step < one.history.size(); ++step) {
    const Json wanted = Json::parse(one.history[step] + "}"),
               got = Json::parse(seen.history[step] + "}");
    for (const char* value : {"loss", "grad_norm"}) {
      const double number = wanted[value];
      EXPECT_NEAR(got[value].get<double>(), number, 1e-5 * std::max(1.0, number)) << value;
    }
    EXPECT_EQ(got["tokens"], wanted["tokens"]);
  }
  const auto wanted = Exported("one"), weights = Exported("mesh");
  ASSERT_EQ(weights.size(), wanted.size());
  ASSERT_FALSE(wanted.empty());
  for (const auto& [name, values] : wanted) {
    const auto found = weights.find(name);
    ASSERT_NE(found, weights.end()) << name;
    ASSERT_EQ(found->second.size(), values.size()) << name;
    double worst = 0;
    for (size_t i = 0; i < values.size(); ++i)
      worst = std::max<double>(worst, std::abs(values[i] - found->second[i]));
    EXPECT_LE(worst, 1e-5) << name;
  }
  EXPECT_EQ(seen.status["mesh"]["pipeline"], 2);
  EXPECT_EQ(seen.status["mesh"]["data"], 2);
  EXPECT_EQ(seen.status["mesh"]["tensor"], 2);
  EXPECT_EQ(seen.status["placement"], "each of 4 tensor groups is on one host");
  EXPECT_EQ(seen.status["ranks"][7]["position"],
            Json({{"pipeline", 1}, {"data", 1}, {"tensor", 1}}));
}

struct Killed {
  int rank;
  bool offloaded;
  const char* where;
};

// Who of a mesh 2 x 2 x 2 is killed: each stage, each data index, each tensor rank.
class KilledInAMeshTest : public MeshTest, public testing::WithParamInterface<Killed> {
 protected:
  static Strings Job(bool offloaded) {
    const Strings job = Joined(Mesh("tensor: 2, pipeline: 2"), {"--set", "steps=60"});
    if (offloaded) return Joined(job, Offload(/*stores=*/1, /*replicas=*/1, /*parameters=*/true));
    return Joined(job, {"--set", "checkpoint={dir: ckpt, interval_steps: 10, keep_last: 2}"});
  }
  // Trained once for all.
  const Result& Wanted(bool offloaded) {
    static auto* const wanted = new std::map<bool, Result>();
    const auto found = wanted->find(offloaded);
    if (found != wanted->end()) return found->second;
    return (*wanted)[offloaded] = TrainOn(8, "undisturbed", Job(offloaded));
  }
};

TEST_P(KilledInAMeshTest, TheJobRecoversAndEndsAsIfNothingHadHappened) {
  const Killed& killed = GetParam();
  const Result& wanted = Wanted(killed.offloaded);
  workers_ = 8;
  const auto local = StartJson("w", Job(killed.offloaded));
  ASSERT_TRUE(AwaitSteps("w", 15, local.get()));
  const std::string member = MemberOfRank("w", killed.rank);
  ASSERT_FALSE(member.empty());
  ASSERT_EQ(kill(PidOf("w", member), SIGKILL), 0) << member;
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_FALSE(seen.digest.empty());
  EXPECT_GE(seen.status["generation"], 2);
  if (killed.offloaded) {
    EXPECT_EQ(seen.steps_lost, 0u);
  }
  EXPECT_TRUE(SawState(*local, "RECOVERING")) << local->Out();
  // The one that died is named, and nobody who waited for it in another line.
  EXPECT_THAT(local->Out(), HasSubstr(absl::StrCat("rank ", killed.rank, " (", member)));
  EXPECT_THAT(local->Out(), HasSubstr("signal 9"));
}

INSTANTIATE_TEST_SUITE_P(EachClassOfPositions, KilledInAMeshTest,
                         testing::Values(Killed{0, false, "FirstStageFirstTensorRank"},
                                         Killed{3, false, "FirstStageSecondTensorRank"},
                                         Killed{4, false, "LastStageFirstTensorRank"},
                                         Killed{7, false, "LastStageSecondTensorRank"},
                                         Killed{2, true, "FirstStageOffloaded"},
                                         Killed{5, true, "LastStageOffloaded"}),
                         [](const auto& info) { return std::string(info.param.where); });

class ElasticMeshTest : public PodsTest {};

TEST_F(ElasticMeshTest, AWorkerThatIsGoneForGoodCostsAReplica) {
  StartPod("coordinator", ZEROSHARD_COORDINATOR_PROGRAM,
           {"--replacement-grace", "1", "--member-timeout", "4"});
  for (int i = 0; i < 4; ++i) StartWorker(absl::StrCat("worker-", i));
  const Strings numbers = {"--set", "steps=100000", "--set", "deterministic=true"};
  Submit(
      Joined(Joined(numbers, Mesh("pipeline: 2")),
             {"--set", "resources={workers: 4, min_workers: 2}", "--set",
              absl::StrCat("checkpoint={dir: ", WorkPath("w", "ckpt"), ", interval_steps: 5}")}));
  ExpectTrainingOn({"worker-0", "worker-1", "worker-2", "worker-3"});
  ASSERT_TRUE(Eventually(kPatience, [&] { return History("w").size() >= 12; }));
  KillPod("worker-3");
  ASSERT_TRUE(Eventually(kPatience, [&] {
    return Ranks() == std::set<std::string>{"worker-0", "worker-1"};
  })) << Status();
  EXPECT_TRUE(AwaitMoreSteps(5)) << Status();
  EXPECT_EQ(Status()["mesh"]["data"], 1);
  EXPECT_THAT(Status().dump(), HasSubstr("2 of 4 workers, as resources.min_workers allows"));
  // The third is no half of a replica.
  const std::string nodes = Ask({"nodes"}).dump();
  EXPECT_THAT(nodes, HasSubstr("\"state\":\"idle\"")) << nodes;
  const std::vector<std::string> seen = WithoutCosts(History("w"));
  pods_.clear();
  // The same numbers as without a pipeline, and with other data-parallel ranks.
  const auto local = StartLocal("undisturbed", numbers);
  EXPECT_TRUE(Eventually(kPatience, [&] { return History("undisturbed").size() >= seen.size(); }));
  local->Signal(SIGKILL);
  local->Wait(kPatience);
  const std::vector<std::string> wanted = WithoutCosts(History("undisturbed"));
  const size_t common = std::min(seen.size(), wanted.size());
  ASSERT_GT(common, 0u);
  for (size_t i = 0; i < common; ++i) ASSERT_EQ(seen[i], wanted[i]);
}

}  // namespace
}  // namespace zeroshard::cluster
