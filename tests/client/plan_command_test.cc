#include <algorithm>
#include <cmath>

#include "common/exit_codes.h"
#include "nlohmann/json.hpp"
#include "tests/client/command_fixture.h"

namespace zeroshard {
namespace {

using Json = nlohmann::ordered_json;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class PlanCommandTest : public CommandTest {
 protected:
  Json PlanJson(std::vector<std::string> args, int code = kExitOk) {
    args.insert(args.begin(), "plan");
    args.insert(args.end(), {"--output", "json"});
    const Outcome outcome = Run(args);
    EXPECT_EQ(outcome.code, code) << outcome.err;
    return Json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
  }
};

// 7.5 B on 64 ranks (Rajbhandari et al. 2020, figure 1), and the rest of that table's column.
TEST_F(PlanCommandTest, PrintsThePapersTable) {
  const Outcome text = Run({"plan", "--parameters", "7.5B", "--gpus", "64"});
  EXPECT_EQ(text.code, kExitOk) << text.err;
  EXPECT_THAT(text.out, AllOf(HasSubstr("120 GB"), HasSubstr("31.41 GB"), HasSubstr("16.64 GB"),
                              HasSubstr("1.875 GB"), HasSubstr("the smallest that fits"),
                              HasSubstr("assumed: 0.4 of a peak"), HasSubstr("ACTIVATIONS")));
  const Json json = PlanJson({"--parameters", "7.5B", "--gpus", "64"});
  ASSERT_EQ(json["zero_table"].size(), 6u);
  EXPECT_EQ(json["zero_table"][3]["ranks"], 64);
  EXPECT_NEAR(json["zero_table"][3]["bytes_by_stage"][3].get<double>(), 1.875e9, 1);
  EXPECT_GE(json["configurations"].size(), 24u);
  EXPECT_EQ(json["assumptions"]["network_bytes_per_second"], 50e9);
  for (const Json& c : json["configurations"]) {
    EXPECT_TRUE(c["fits"].is_boolean());
    if (c.contains("memory_bytes")) {
      uint64_t sum = 0;
      for (const char* kind : {"parameters", "gradients", "optimizer", "activations", "buffers"})
        sum += c["memory_bytes"][kind].get<uint64_t>();
      EXPECT_EQ(c["memory_bytes"]["device"], sum);
    }
  }
}

TEST_F(PlanCommandTest, FindsTheDocumentedCases) {
  Json json = PlanJson(
      {"--parameters", "40B", "--gpus", "1", "--gpu-memory", "32GB", "--host-memory", "1.5TB"});
  EXPECT_EQ(json["smallest"]["stage"], 3);
  EXPECT_EQ(json["smallest"]["offload_param"], "cpu");
  json = PlanJson({"--parameters", "175B", "--gpus", "8", "--gpu-memory", "80GB", "--nvme", "8TB"});
  EXPECT_EQ(json["smallest"]["stage"], 3);
  EXPECT_EQ(json["smallest"]["offload_optimizer"], "nvme");
  json = PlanJson({"--parameters", "2T", "--gpus", "512", "--gpu-memory", "80GB"});
  EXPECT_EQ(json["smallest"]["stage"], 3);
  EXPECT_GT(json["smallest"]["tensor"], 1);
  EXPECT_GT(json["smallest"]["pipeline"], 1);
  // Memory and traffic by place in the pipeline.
  const Outcome text = Run({"plan", "--parameters", "2T", "--gpus", "512"});
  EXPECT_THAT(text.out, AllOf(HasSubstr("first stage"), HasSubstr("last stage"),
                              HasSubstr("TO TENSOR RANKS"), HasSubstr("= (p-1)/(v m + p-1)")));
  ASSERT_GE(json["smallest"]["positions"].size(), 3u);
  uint64_t most = 0;
  for (const Json& at : json["smallest"]["positions"])
    most = std::max(most, at["memory_bytes"]["device"].get<uint64_t>());
  EXPECT_EQ(json["smallest"]["memory_bytes"]["device"], most);
}

// 7.5 B on 16 GPUs of 40 GB, 64 sequences a step: every mesh at the same batch.
TEST_F(PlanCommandTest, SearchListsMeshesBestFirstWithReasons) {
  const std::vector<std::string> args = {"--parameters", "7.5B", "--gpus",  "16", "--batch", "64",
                                         "--gpu-memory", "40GB", "--search"};
  const Json json = PlanJson(args);
  const Json& fits = json["search"]["fits"];
  ASSERT_GE(fits.size(), 4u);
  double last = INFINITY;
  for (const Json& fit : fits) {
    EXPECT_TRUE(fit["fits"]);
    EXPECT_EQ(fit["devices"], 16);
    EXPECT_LE(fit["memory_bytes"]["device"], 40'000'000'000);
    EXPECT_EQ(fit["tokens_per_step"], 64 * 1024);
    EXPECT_LE(fit["tokens_per_second"], last);
    last = fit["tokens_per_second"];
    EXPECT_THAT(fit["reason"].get<std::string>(), HasSubstr("limited by"));
    const double m = fit["micro_batches_per_rank"], p = fit["pipeline"], v = fit["virtual_stages"];
    EXPECT_DOUBLE_EQ(fit["bubble_share"]["predicted"], (p - 1) / (v * m + p - 1));
  }
  // 16 bytes a parameter are 120 GB.
  bool whole = false;
  for (const Json& misfit : json["search"]["misfits"]) {
    if (misfit["data"] != 16) continue;
    whole = true;
    EXPECT_EQ(misfit["nearest"][0]["stage"], 0);
    EXPECT_GE(misfit["nearest"][0]["lacks"][0]["wanted_bytes"], 120'000'000'000);
  }
  EXPECT_TRUE(whole);
  EXPECT_FALSE(json.contains("configurations"));
  std::vector<std::string> command = {"plan"};
  command.insert(command.end(), args.begin(), args.end());
  const Outcome text = Run(command);
  EXPECT_EQ(text.code, kExitOk) << text.err;
  EXPECT_THAT(text.out,
              AllOf(HasSubstr("best first by predicted tokens a second"), HasSubstr("1."),
                    HasSubstr("what does not fit"), HasSubstr("1x1x16"), HasSubstr("the best: ")));
}

TEST_F(PlanCommandTest, SearchOfAJobTakesItsBatchAndSaysWhereNothingFits) {
  const Json json = PlanJson({job_, "--search", "--gpus", "2"});
  EXPECT_TRUE(json.contains("job"));
  EXPECT_EQ(json["search"]["fits"][0]["tokens_per_step"], json["job"]["tokens_per_step"]);
  const Outcome none =
      Run({"plan", "--parameters", "175B", "--gpus", "2", "--host-memory", "0", "--search"});
  EXPECT_EQ(none.code, kExitDoesNotFit);
  EXPECT_THAT(none.out, AllOf(HasSubstr("nothing fits on 2 devices"), HasSubstr("80 GB there")));
}

TEST_F(PlanCommandTest, WhereNothingFitsItSaysWhatLacksAndExitsWith6) {
  const Outcome text = Run({"plan", "--parameters", "175B", "--gpus", "1", "--host-memory", "0"});
  EXPECT_EQ(text.code, kExitDoesNotFit);
  EXPECT_THAT(text.out, AllOf(HasSubstr("nothing fits on 1 device"), HasSubstr("80 GB there")));
  EXPECT_THAT(text.err, IsEmpty());
  const Json json =
      PlanJson({"--parameters", "175B", "--gpus", "1", "--host-memory", "0"}, kExitDoesNotFit);
  EXPECT_TRUE(json["smallest"].is_null());
  EXPECT_FALSE(json["configurations"][0]["lacks"].empty());
}

// gpt2, hidden 64, one layer, tied: 256*64 + 16*64 of the embedding, 12*64^2 + 13*64 of the block,
// 2*64 of the head; fp32 on two ranks at stage 1. A rank's share of a unit is a multiple of 64: of
// the block, 781 times 64 elements, it is 391 times 64, so that a gathered block has 64 more.
TEST_F(PlanCommandTest, AJobIsPlannedRankByRankToTheByte) {
  constexpr uint64_t kElements = 256 * 64 + 16 * 64 + 12 * 64 * 64 + 13 * 64 + 2 * 64;
  const Json json = PlanJson({job_, "--set", "zero_optimization.stage=1"});
  EXPECT_EQ(json["model"]["parameters"], kElements);
  ASSERT_EQ(json["ranks"].size(), 2u);
  EXPECT_EQ(json["ranks"][0]["parameter_bytes"], 4 * (kElements + 64));
  EXPECT_EQ(json["ranks"][0]["optimizer_bytes"],
            8 * json["ranks"][0]["owned_parameters"].get<uint64_t>());
  EXPECT_EQ(json["job"]["stage"], 1);
  EXPECT_EQ(json["job"]["memory_bytes"]["parameters"], 4 * (kElements + 64));
  EXPECT_TRUE(json["job"]["fits"]);
  const Outcome text = Run({"plan", job_});
  EXPECT_EQ(text.code, kExitOk) << text.err;
  EXPECT_THAT(text.out, AllOf(HasSubstr("tiny: "), HasSubstr("this job, rank by rank"),
                              HasSubstr("as it is written it fits such devices: yes")));
  // One that does not fit as it is written, where something else would.
  const Outcome small = Run({"plan", job_, "--gpu-memory", "1MB"});
  EXPECT_THAT(small.out, HasSubstr("it fits such devices: no: "));
}

TEST_F(PlanCommandTest, BadInputGetsOneMessageThatNamesTheOption) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"plan"}, "what is to be planned?"},
      {{"plan", job_, "--parameters", "7B"}, "job excludes --parameters"},
      {{"plan", "--parameters", "seven"}, "--parameters: seen \"seven\""},
      {{"plan", "--parameters", "1k"}, "10 million to 20 trillion"},
      {{"plan", "--parameters", "7B", "--gpu-memory", "80"}, "at least 1MB"},
      {{"plan", "--parameters", "7B", "--gpu-memory", "80Gbit"}, "--gpu-memory: seen \"80Gbit\""},
      {{"plan", "--parameters", "7B", "--gpu-memory", "0"}, "--gpu-memory"},
      {{"plan", "--parameters", "7B", "--network", "fast"}, "--network: seen \"fast\""},
      {{"plan", "--parameters", "7B", "--gpus", "0"}, "--gpus"},
      {{"plan", "--parameters", "7B", "--peak-share", "2"}, "--peak-share"},
      {{"plan", "--parameters", "7B", "--peak-share", "nan"}, "--peak-share"},
      {{"plan", "--parameters", "7B", "--peak", "0"}, "--peak: seen 0"},
      {{"plan", "--parameters", "7B", "--host-link", "0GB"}, "--host-link: seen 0"},
      {{"plan", "--parameters", "7B", "--batch", "7", "--micro-batch", "2"}, "--batch: seen 7"},
      {{"plan", "--parameters", "7B", "--batch", "8", "--accumulation", "2"}, "--accumulation"},
      {{"plan", "--parameters", "7B", "--search", "--no-meshes"}, "--no-meshes"},
      {{"plan", "--parameters", "7B", "--network", "400Gb"}, "--network: seen \"400Gb\""},
  };
  for (const auto& [args, wanted] : cases) {
    const Outcome outcome = Run(args);
    EXPECT_EQ(outcome.code, kExitUsage) << outcome.err;
    ExpectOneMessage(outcome);
    EXPECT_THAT(outcome.err, HasSubstr(wanted));
  }
}

TEST_F(PlanCommandTest, AnOptionOfTheOtherKindOfModelIsRefusedAndNotIgnored) {
  const std::vector<std::pair<std::string, std::string>> of_parameters = {
      {"--sequence", "128"}, {"--vocab", "256"},  {"--micro-batch", "2"}, {"--accumulation", "2"},
      {"--batch", "8"},      {"--replicas", "2"}, {"--type", "fp32"}};
  for (const auto& [option, value] : of_parameters) {
    for (const std::vector<std::string>& args :
         {std::vector<std::string>{"plan", job_, option, value}, {"plan", option, value}}) {
      const Outcome outcome = Run(args);
      EXPECT_EQ(outcome.code, kExitUsage) << outcome.err;
      ExpectOneMessage(outcome);
      EXPECT_THAT(outcome.err, HasSubstr(absl::StrCat(option, " requires --parameters")));
    }
    const Outcome taken = Run({"plan", "--parameters", "125M", option, value});
    EXPECT_EQ(taken.code, kExitOk) << taken.err;
  }
  const Outcome set = Run({"plan", "--parameters", "125M", "--set", "steps=5"});
  EXPECT_EQ(set.code, kExitUsage);
  EXPECT_THAT(set.err, HasSubstr("--set requires job"));
  EXPECT_EQ(Run({"plan", job_, "--set", "steps=5"}).code, kExitOk);
}

// Those of the cluster, by which each plan changes: none is ignored with a job either.
TEST_F(PlanCommandTest, AnOptionOfTheClusterCountsForBothKinds) {
  const std::vector<std::vector<std::string>> options = {
      {"--gpus", "4"},         {"--gpus-per-host", "1"},
      {"--gpu-memory", "2MB"}, {"--host-memory", "0"},
      {"--nvme", "8TB"},       {"--network", "1Gbit"},
      {"--gpu-link", "1GB"},   {"--host-link", "1MB"},
      {"--nvme-speed", "1MB"}, {"--host-memory-speed", "1MB"},
      {"--peak", "1G"},        {"--peak-share", "0.1"},
      {"--link-share", "0.1"}, {"--no-meshes"}};
  for (const std::vector<std::string>& kind :
       {std::vector<std::string>{"plan", job_}, {"plan", "--parameters", "125M"}}) {
    for (const auto& option : options) {
      std::vector<std::string> base = kind;
      // Disks of some size, on hosts of several, so that each option has something to change.
      if (option[0] != "--nvme") base.insert(base.end(), {"--nvme", "1TB"});
      base.insert(base.end(), {"--output", "json"});
      std::vector<std::string> args = base;
      args.insert(args.end(), option.begin(), option.end());
      EXPECT_NE(Run(args).out, Run(base).out) << kind.back() << " " << option[0];
    }
  }
}

TEST_F(PlanCommandTest, HelpSaysWhatItIsAndHowItExits) {
  const Outcome outcome = Run({"plan", "--help"});
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("Exit code 0"), HasSubstr("--gpu-memory"),
                                 HasSubstr("400Gbit"), Not(HasSubstr("--coordinator"))));
}

}  // namespace
}  // namespace zeroshard
