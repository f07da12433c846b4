#include "common/plan/stage_model.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan/saturating.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

ModelTable Model(const std::string& architecture, uint32_t layers) {
  v1::ModelSpec spec;
  spec.set_architecture(architecture);
  spec.set_hidden_size(32);
  spec.set_layers(layers);
  spec.set_heads(4);
  spec.set_sequence_length(8);
  spec.set_vocab_size(61);
  return *MakeModelTable(spec);
}

std::string Units(const StageModel& stage) {
  std::string text;
  for (const UnitTable& unit : stage.model.units)
    if (!unit.parameters.empty()) absl::StrAppend(&text, unit.name, " ");
  return text;
}

// "f1+-" a forward of unit 1 that gathers and releases.
std::string Uses(const std::vector<UnitUse>& uses) {
  std::string text;
  for (const UnitUse& use : uses)
    absl::StrAppend(&text, text.empty() ? "" : " ", use.backward ? "b" : "f", use.unit,
                    use.gather ? "+" : "", use.release ? "-" : "");
  return text;
}

std::string Uses(const ZeroPolicy& policy) { return Uses(policy.uses); }

const PipelineStages kTwo{.pipeline = 2, .begin = {0, 2, 4}};  // of two layers

TEST(StageModelTest, ARankHasItsUnitsInTheirPlaces) {
  const ModelTable model = Model("llama", 6);
  const PipelineStages stages{.pipeline = 2, .begin = {0, 2, 4, 6, 8}};
  const StageModel first = MakeStageModel(model, stages, 0),
                   last = MakeStageModel(model, stages, 1);
  EXPECT_EQ(Units(first), "embedding blocks.0 blocks.3 blocks.4 ");
  EXPECT_EQ(Units(last), "blocks.1 blocks.2 blocks.5 head ");
  for (size_t u = 0; u < model.units.size(); ++u) {
    EXPECT_EQ(first.model.units[u].name, model.units[u].name);
    EXPECT_EQ(first.model.units[u].length + last.model.units[u].length, model.units[u].length);
  }
  EXPECT_EQ(first.tied_peer, -1);
  EXPECT_EQ(last.tied_peer, -1);
  EXPECT_FALSE(last.copy);
}

TEST(StageModelTest, TheLastRankOfATiedModelHasTheTableWhereTheFirstHasIt) {
  const ModelTable model = Model("gpt2", 2);
  const StageModel first = MakeStageModel(model, kTwo, 0), last = MakeStageModel(model, kTwo, 1);
  EXPECT_TRUE(last.copy);
  EXPECT_FALSE(first.copy);
  EXPECT_EQ(first.tied_peer, 1);
  EXPECT_EQ(last.tied_peer, 0);
  const UnitTable& copy = last.model.units[0];
  ASSERT_EQ(copy.parameters.size(), 1u);
  EXPECT_EQ(copy.parameters[0].name, "wte.weight");
  EXPECT_EQ(copy.length, model.units[0].length) << "another layout";
  EXPECT_FALSE(last.Runs(0));
  // On one rank there is nothing to copy.
  const StageModel alone = MakeStageModel(model, {.pipeline = 1, .begin = {0, 2, 4}}, 0);
  EXPECT_FALSE(alone.copy);
  EXPECT_EQ(alone.tied_peer, -1);
  EXPECT_EQ(Units(alone), "embedding blocks.0 blocks.1 head ");
}

ZeroPolicy Policy(const std::string& architecture, int rank, int64_t reuse) {
  const ModelTable model = Model(architecture, 2);
  const ZeroOptions options{.stage = 3,
                            .world = 2,
                            .micro_batches = 4,
                            .persistence_threshold = 0,
                            .max_reuse_distance = reuse};
  const auto schedules = *MakePipelineSchedule({.stages = 2, .micro_batches = RoundsOf(options)});
  return MakeStagePolicy(MakeStageModel(model, kTwo, rank), options,
                         schedules[static_cast<size_t>(rank)]);
}

// 1F1B of two micro-batches: the first stage forwards both before the first backward. The
// embedding's backward needs no parameters, the head's forward belongs to its backward.
TEST(StageModelTest, UsesAreOfAWholeStepInTheOrderOfTheSchedule) {
  EXPECT_EQ(Uses(Policy("llama", 0, 0)), "f0+- f1+- f0+- f1+ b1 b1-");
  EXPECT_EQ(Uses(Policy("llama", 1, 0)), "f2+- f3+- b2+ f2- f3+- b2+-");
  EXPECT_EQ(Uses(Policy("gpt2", 1, 0)), "f2+- f0+- f3+- b2+ f2- f0+- f3+- b2+-");
}

TEST(StageModelTest, AUnitIsKeptFromOneMicroBatchToTheNextWhereTheBoundsAllowIt) {
  const int64_t all = int64_t{1} << 40;
  EXPECT_EQ(Uses(Policy("llama", 0, all)), "f0+ f1+ f0- f1 b1 b1-");
  EXPECT_EQ(Uses(Policy("llama", 1, all)), "f2+ f3+ b2 f2 f3- b2-");
}

TEST(StageModelTest, AnEvaluationUsesEachUnitOnceAMicroBatchTheHeadsTableToo) {
  const auto schedules =
      *MakeForwardSchedule({.stages = 2, .virtual_stages = 1, .micro_batches = 2});
  const auto uses = [&](const std::string& architecture, int rank, int64_t reuse) {
    return Uses(EvaluationUses(MakeStageModel(Model(architecture, 2), kTwo, rank),
                               Policy(architecture, rank, reuse),
                               schedules[static_cast<size_t>(rank)]));
  };
  EXPECT_EQ(uses("llama", 0, 0), "f0+- f1+- f0+- f1+-");
  EXPECT_EQ(uses("llama", 1, 0), "f2+- f3+- f2+- f3+-");
  EXPECT_EQ(uses("gpt2", 1, 0), "f2+- f0+- f3+- f2+- f0+- f3+-");
  EXPECT_EQ(uses("gpt2", 0, int64_t{1} << 40), "f0+ f1+ f0- f1-");
}

TEST(StageModelTest, RowsAndHeadAreWhereTheirUnitsAre) {
  const ZeroPolicy first = Policy("gpt2", 0, 0), last = Policy("gpt2", 1, 0);
  EXPECT_TRUE(first.has_rows && !first.tied && !first.copies_table);
  EXPECT_TRUE(!last.has_rows && last.tied && last.copies_table);
  EXPECT_EQ(first.layouts[0].shard, last.layouts[0].shard);
}

// Full gradients are stages 2 and 3's alone, of several rounds, and not where the order counts.
TEST(StageModelTest, FullGradientsAreKeptWhereTheyWereAskedFor) {
  const ModelTable model = Model("llama", 2);
  const auto mode = [&](ZeroOptions options) {
    return MakeZeroPolicy(model, options).gradient_mode;
  };
  for (const int stage : {2, 3}) {
    EXPECT_EQ(mode({.stage = stage, .micro_batches = 2, .full_gradients = true}),
              GradientMode::kFullAccumulate);
    EXPECT_EQ(mode({.stage = stage, .micro_batches = 1, .full_gradients = true}),
              GradientMode::kShard);
    EXPECT_EQ(
        mode({.stage = stage, .micro_batches = 2, .deterministic = true, .full_gradients = true}),
        GradientMode::kShard);
    EXPECT_EQ(mode({.stage = stage, .micro_batches = 2}), GradientMode::kShard);
  }
}

// What no machine has stays out of reach, and never wraps to something small.
TEST(StageModelTest, ActivationsOfAHugeModelSaturate) {
  ModelTable model = Model("llama", 8);
  model.config.sequence = 32767;
  model.config.hidden = 65536;
  model.config.intermediate = 262144;
  const auto schedules =
      MakePipelineSchedule({.stages = 2, .virtual_stages = 1, .micro_batches = 2});
  ASSERT_TRUE(schedules.ok()) << schedules.status();
  const auto stages = CutStages(UnitCosts(model.config, false), 2, 1);
  ASSERT_TRUE(stages.ok()) << stages.status();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(StageActivationBytes(MakeStageModel(model, *stages, rank),
                                   {.micro_batch = int64_t{1} << 40, .micro_batches = 2},
                                   (*schedules)[static_cast<size_t>(rank)]),
              kMostBytes);
  }
}

// A slot i mod OpenMicroBatches is free when micro-batch i is opened, for every schedule.
TEST(StageModelTest, OpenMicroBatchesNeverShareAPlace) {
  for (int p = 1; p <= 4; ++p) {
    for (int v = 1; v <= 3; ++v) {
      for (int64_t m = 1; m <= 9; ++m) {
        const auto schedules =
            *MakePipelineSchedule({.stages = p, .virtual_stages = v, .micro_batches = m});
        for (const RankSchedule& schedule : schedules) {
          const int64_t places = OpenMicroBatches(schedule);
          std::vector<int64_t> holds(static_cast<size_t>(places), -1);
          std::vector<int> left(static_cast<size_t>(m), 2 * v);
          for (const Action& action : schedule.actions) {
            if (action.kind == ActionKind::kTransfers) continue;
            int64_t& place = holds[static_cast<size_t>(action.micro_batch % places)];
            if (place < 0) place = action.micro_batch;
            ASSERT_EQ(place, action.micro_batch) << "p " << p << " v " << v << " m " << m;
            if (--left[static_cast<size_t>(action.micro_batch)] == 0) place = -1;
          }
          EXPECT_LE(places,
                    std::max<int64_t>(1, std::min(m, AliveBound(schedule.shape, schedule.rank))));
        }
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard
