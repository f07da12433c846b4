// What ranks of real processes hold and move, against the plan that the coordinator made of it.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster/offload_fixture.h"

namespace zeroshard::cluster {
namespace {

using Json = nlohmann::ordered_json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

struct Case {
  const char* name;
  int stage;
  const char* offload;  // "": none
  bool parameters;
  std::vector<std::string> more;
};

class PlanTest : public OffloadTest, public testing::WithParamInterface<Case> {};

// Model state is to agree within 2 % and traffic exactly: all of it is equal.
TEST_P(PlanTest, ARankMeasuresWhatWasPlanned) {
  const Case& c = GetParam();
  std::vector<std::string> args = {"--set", absl::StrCat("zero_optimization.stage=", c.stage),
                                   "--set", "steps=12"};
  if (*c.offload != '\0') {
    const std::vector<std::string> offload = Offload(2, 1, c.parameters, c.offload);
    args.insert(args.end(), offload.begin(), offload.end());
  }
  for (const std::string& set : c.more) args.insert(args.end(), {"--set", set});
  const Json status = Train("w", args).status;
  ASSERT_EQ(status["plan"].size(), 2u) << status.dump();
  ASSERT_EQ(status["ranks"].size(), 2u);
  for (size_t rank = 0; rank < 2; ++rank) {
    const Json& plan = status["plan"][rank];
    ASSERT_TRUE(status["ranks"][rank].contains("usage")) << status.dump();
    const Json& usage = status["ranks"][rank]["usage"];
    for (const char* kind :
         {"parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"}) {
      EXPECT_EQ(usage[kind], plan[kind]) << "rank " << rank << " " << kind;
    }
    EXPECT_GT(usage["step"], 0) << "rank " << rank;
    EXPECT_EQ(usage["traffic_bytes"], plan["traffic_bytes_per_step"]) << "rank " << rank;
    EXPECT_EQ(usage["push_bytes"], plan["push_bytes_per_step"]) << "rank " << rank;
    EXPECT_EQ(usage["pull_bytes"], plan["pull_bytes_per_step"]) << "rank " << rank;
    EXPECT_GT(plan["traffic_bytes_per_step"], 0);
    EXPECT_EQ(plan["push_bytes_per_step"] > 0, *c.offload != '\0');
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, PlanTest,
    testing::Values(
        Case{"Stage0", 0, "", false, {"bf16.enabled=true"}}, Case{"Stage1Fp32", 1, "", false, {}},
        Case{"Stage2Deterministic", 2, "", false, {"bf16.enabled=true", "deterministic=true"}},
        Case{"Stage3Evaluates",
             3,
             "",
             false,
             {"bf16.enabled=true", "eval={data: [text.txt], interval_steps: 3, batches: 1}"}},
        Case{"Stage1Saves", 1, "", false, {"checkpoint={dir: ckpt, interval_steps: 4}"}},
        Case{"Stage1Offload", 1, "cpu", false, {"bf16.enabled=true"}},
        Case{"Stage2OffloadNvme", 2, "nvme", false, {"bf16.enabled=true"}},
        Case{"Stage3Offload", 3, "cpu", false, {}},
        Case{"Stage3OffloadParameters", 3, "cpu", true, {"bf16.enabled=true"}},
        // One round: gradients leave as they are reduced.
        Case{"Stage2OffloadOneRound", 2, "cpu", false, {"train_batch_size=4"}},
        Case{"Stage3OffloadOneRound", 3, "cpu", true, {"bf16.enabled=true", "train_batch_size=4"}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(OffloadTest, StatusShowsPlanAndMeasurementSideBySide) {
  const auto local = StartLocal("w", {"--set", "steps=100000"});
  ASSERT_TRUE(AwaitSteps("w", 5, local.get()));
  const std::string coordinator = AddressOf("w", "coordinator");
  std::string text;
  EXPECT_TRUE(Eventually(kPatience, [&] {
    text = Run({"status", "small", "--coordinator", coordinator})->Out();
    return text.find("measured") != std::string::npos &&
           text.find("measured", text.find("measured") + 1) != std::string::npos;
  })) << text;
  EXPECT_THAT(text, AllOf(HasSubstr("planned"), HasSubstr("TRAFFIC/STEP"), Not(HasSubstr("%)"))));
}

// 155 B parameters in fp32 are 2.5 TB of state.
TEST_F(OffloadTest, AJobThatTheWorkersCannotHoldIsRefusedAtSubmit) {
  const auto local =
      StartLocal("w", {"--set", "model.hidden_size=16384", "--set", "model.layers=48", "--set",
                       "model.heads=128", "--set", "zero_optimization.stage=0"});
  EXPECT_EQ(local->Wait(kPatience), 6);
  EXPECT_THAT(local->Err(),
              AllOf(HasSubstr("does not fit the memory of the workers"), HasSubstr("optimizer"),
                    HasSubstr("for its 2 workers"), HasSubstr("--force")));
  EXPECT_TRUE(History("w").empty());
}

}  // namespace
}  // namespace zeroshard::cluster
