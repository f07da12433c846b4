#include "common/plan/transient_bytes.h"

#include "common/plan/pipeline_schedule.h"
#include "common/plan/stage_model.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

ModelTable Gpt2() {
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(768);
  spec.set_layers(12);
  spec.set_heads(12);
  spec.set_sequence_length(1024);
  spec.set_vocab_size(50257);
  return *MakeModelTable(spec);
}

ZeroOptions Stage3() {
  ZeroOptions options;
  options.stage = 3;
  options.dtype = DType::kBF16;
  options.world = options.micro_batches = 4;
  options.persistence_threshold = options.max_reuse_distance = options.prefetch_bucket = 0;
  return options;
}

// In elements. Gradients: of the head matrix three ranges of as many rows as 2^22 elements have and
// the rest, the head's norm, three blocks; the positions' fit into the rest's. Rows of 1024 tokens,
// the rank's own and four ranks'.
TEST(TransientBytesTest, CountsWhatPoolsTake) {
  const ModelTable model = Gpt2();
  ZeroOptions options = Stage3();
  const int64_t C = model.config.hidden, V = model.config.vocab;
  const int64_t table = model.units[0].length, block = model.units[1].length;
  const int64_t head = model.units.back().length;
  const auto padded = [](int64_t length) { return ShardLayout::Make(length, 4).Padded(); };
  const int64_t rows = (int64_t{1} << 22) / C / 64 * 64;
  const int64_t gradients = 3 * rows * C + V % rows * C + head + 3 * block;
  // And of the rows that this rank owns which are touched: a quarter of the vocabulary, positions
  // aside, of 4096 tokens.
  const int64_t owned = ShardLayout::Make(table, 4).shard / C + 1;
  const int64_t row_bytes = (1024 + 4 * 1024) * (4 + 2 * C) + 4 * (owned + 4096 + 1);
  const auto bytes = [&] {
    return static_cast<int64_t>(TransientBytes(model, MakeZeroPolicy(model, options)));
  };
  // The head's use takes the embedding's buffer again for the tied table.
  EXPECT_EQ(bytes(), 2 * (padded(table) + padded(head) + padded(block) + gradients) + row_bytes);
  options.prefetch_bucket = block;  // two blocks at once
  EXPECT_EQ(bytes(),
            2 * (padded(table) + padded(head) + 2 * padded(block) + gradients) + row_bytes);
  options.stage = 1;  // reduced in place, nothing gathered; the tied table's rows travel alone
  EXPECT_EQ(bytes(), row_bytes);
}

// A rank of a pipeline that keeps its units from one micro-batch to the next holds all of them at
// once; one that has no room for that, one at a time.
TEST(TransientBytesTest, UnitsThatAreKeptThroughAStepAreAllThere) {
  const ModelTable model = Gpt2();
  const auto stages = *CutStages(UnitCosts(model.config, false), 3, 1);
  ZeroOptions options = Stage3();
  options.micro_batches = 16;
  const auto schedules = *MakePipelineSchedule({.stages = 3, .micro_batches = RoundsOf(options)});
  const StageModel stage = MakeStageModel(model, stages, 1);
  const auto bytes = [&](int64_t reuse) {
    options.max_reuse_distance = reuse;
    return static_cast<int64_t>(
        TransientBytes(stage.model, MakeStagePolicy(stage, options, schedules[1])));
  };
  const int64_t block = model.units[1].length;
  const int64_t padded = ShardLayout::Make(block, 4).Padded();
  const int64_t blocks = stages.End(1) - stages.Begin(1);
  EXPECT_EQ(bytes(int64_t{1} << 40), 2 * (blocks * padded + 3 * block));
  EXPECT_EQ(bytes(0), 2 * (padded + 3 * block));
}

// What the ends of a tied table exchange: in the wire type, and beside it where sums are fp32.
TEST(TransientBytesTest, EndsOfATiedTableHaveRoomForTheOther) {
  const ModelTable model = Gpt2();
  const PipelineStages stages{.pipeline = 2, .begin = {0, 7, 14}};
  ZeroOptions options = Stage3();
  options.stage = 1;
  options.world = 1;
  for (const int64_t micro_batches : {1, 4}) {
    options.micro_batches = micro_batches;
    const auto schedules = *MakePipelineSchedule({.stages = 2, .micro_batches = micro_batches});
    const auto bytes = [&](const StageModel& stage) {
      return static_cast<int64_t>(TransientBytes(
          stage.model, MakeStagePolicy(stage, options, schedules[static_cast<size_t>(1)])));
    };
    const StageModel last = MakeStageModel(model, stages, 1);
    StageModel alone = last;
    alone.copy = false;
    const int64_t table = RoundUp(model.config.vocab * model.config.hidden, 64);
    EXPECT_EQ(bytes(last) - bytes(alone), table * 2 * (micro_batches > 1 ? 2 : 1));
  }
}

}  // namespace
}  // namespace zeroshard
