#include "common/plan/activation_table.h"

#include <limits>
#include <set>

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

ModelConfig Gpt2Small() {
  ModelConfig c;
  c.architecture = Architecture::kGpt2;
  c.hidden = 768;
  c.layers = 12;
  c.heads = c.kv_heads = 12;
  c.head_dim = 64;
  c.intermediate = 3072;
  c.sequence = 128;
  c.vocab = 50257;
  c.tied = true;
  c.qkv_bias = c.proj_bias = c.mlp_bias = true;
  return c;
}

ModelConfig LlamaOdd() {
  ModelConfig c;
  c.architecture = Architecture::kLlama;
  c.hidden = 48;
  c.layers = 3;
  c.heads = 6;
  c.kv_heads = 2;
  c.head_dim = 8;
  c.intermediate = 100;
  c.sequence = 7;
  c.vocab = 257;
  return c;
}

TEST(ActivationTableTest, EntriesAreAlignedAndDoNotOverlap) {
  for (const ModelConfig& config : {Gpt2Small(), LlamaOdd()}) {
    for (UnitKind kind : {UnitKind::kEmbedding, UnitKind::kBlock, UnitKind::kHead}) {
      for (int64_t micro_batch : {1, 3}) {
        for (DType dtype : {DType::kF32, DType::kBF16}) {
          for (bool checkpointing : {false, true}) {
            const ActivationTable table =
                MakeActivationTable(config, kind, micro_batch, dtype, checkpointing);
            std::set<std::string> names;
            for (const auto& [entries, total] :
                 {std::make_pair(&table.kept, table.kept_bytes),
                  std::make_pair(&table.scratch, table.scratch_bytes)}) {
              int64_t end = 0;
              for (const ActivationInfo& entry : *entries) {
                EXPECT_EQ(entry.offset, RoundUp(end, 64)) << entry.name;
                EXPECT_TRUE(names.insert(entry.name).second) << entry.name;
                end = entry.offset + entry.elements * static_cast<int64_t>(SizeOf(entry.dtype));
              }
              EXPECT_EQ(total, RoundUp(end, 64));
            }
          }
        }
      }
    }
  }
}

TEST(ActivationTableTest, BlocksAndHeadKeepTheirInputFirst) {
  for (UnitKind kind : {UnitKind::kBlock, UnitKind::kHead}) {
    const ActivationTable table =
        MakeActivationTable(Gpt2Small(), kind, 2, DType::kBF16, /*checkpointing=*/false);
    ASSERT_FALSE(table.kept.empty());
    EXPECT_EQ(table.kept[0].name, "input");
    EXPECT_EQ(table.kept[0].offset, 0);
    EXPECT_EQ(table.kept[0].elements, 2 * 128 * 768);
  }
}

TEST(ActivationTableTest, ABlockKeepsTenTimesItsInputAndTheStatistics) {
  const ActivationTable table =
      MakeActivationTable(Gpt2Small(), UnitKind::kBlock, 1, DType::kBF16, /*checkpointing=*/false);
  // Input, q, k, v, attention's output, residual and four for the MLP; mean and rstd twice, lse.
  EXPECT_EQ(table.kept_bytes, 10 * 128 * 768 * 2 + 4 * 128 * 4 + 128 * 12 * 4);
}

TEST(ActivationTableTest, CheckpointingKeepsTheInputAloneAndMovesTheRest) {
  for (const ModelConfig& config : {Gpt2Small(), LlamaOdd()}) {
    const ActivationTable plain =
        MakeActivationTable(config, UnitKind::kBlock, 2, DType::kF32, false);
    const ActivationTable saved =
        MakeActivationTable(config, UnitKind::kBlock, 2, DType::kF32, true);
    ASSERT_EQ(saved.kept.size(), 1u);
    EXPECT_EQ(saved.kept[0].name, "input");
    EXPECT_EQ(saved.kept_bytes + saved.scratch_bytes, plain.kept_bytes + plain.scratch_bytes);
    for (const ActivationInfo& entry : plain.kept) {
      EXPECT_TRUE(entry.name == "input" || saved.FindScratch(entry.name) != nullptr) << entry.name;
    }
  }
}

TEST(ActivationTableTest, HeadsWiderThanTheHiddenSizeHaveTheirOwnWidth) {
  ModelConfig config = LlamaOdd();
  config.head_dim = 32;  // 6 x 32 = 192 against a hidden size of 48
  config.qkv_bias = true;
  const ActivationTable table =
      MakeActivationTable(config, UnitKind::kBlock, 2, DType::kF32, false);
  EXPECT_EQ(table.FindKept("attn.qkv")->elements, 2 * 7 * (6 + 2 * 2) * 32);
  EXPECT_EQ(table.FindKept("attn.out")->elements, 2 * 7 * 6 * 32);
  EXPECT_EQ(table.FindKept("residual")->elements, 2 * 7 * 48);
  EXPECT_EQ(table.FindScratch("attn.qkv.bias")->elements, (6 + 2 * 2) * 32);
  EXPECT_EQ(table.FindScratch("wide")->elements, 2 * 7 * std::max(100, (6 + 2 * 2) * 32));
}

TEST(ActivationTableTest, DropoutAddsNoByte) {
  for (ModelConfig config : {Gpt2Small(), LlamaOdd()}) {
    for (bool checkpointing : {false, true}) {
      const int64_t without = ActivationBytes(config, 3, DType::kBF16, checkpointing);
      ModelConfig dropped = config;
      dropped.embd_pdrop = dropped.attn_pdrop = dropped.resid_pdrop = 0.1f;
      EXPECT_EQ(ActivationBytes(dropped, 3, DType::kBF16, checkpointing), without);
    }
  }
}

TEST(ActivationTableTest, TheHeadNeverHoldsAllLogitsOfAMicroBatch) {
  for (int64_t micro_batch : {1, 2, 16}) {
    const ActivationTable table =
        MakeActivationTable(Gpt2Small(), UnitKind::kHead, micro_batch, DType::kBF16, false);
    EXPECT_EQ(table.FindScratch("logits")->elements, 50257 * 128);
  }
}

TEST(ActivationTableTest, OnlyMicroBatchesOfSeveralSequencesSumTheHeadsGradient) {
  const auto gradient = [](int64_t micro_batch) {
    return MakeActivationTable(Gpt2Small(), UnitKind::kHead, micro_batch, DType::kBF16, false)
        .FindScratch("lm_head.gradient");
  };
  EXPECT_EQ(gradient(1), nullptr);
  const ActivationTable table =
      MakeActivationTable(Gpt2Small(), UnitKind::kHead, 2, DType::kBF16, false);
  ASSERT_NE(table.FindScratch("lm_head.gradient"), nullptr);
  EXPECT_EQ(table.FindScratch("lm_head.gradient")->dtype, DType::kF32);
  EXPECT_EQ(table.FindScratch("lm_head.gradient")->elements, 50257 * 768);
}

TEST(ActivationTableTest, TheSumIsEveryUnitsKeptOneScratchAndTwoGradients) {
  const ModelConfig config = LlamaOdd();
  const ActivationTable block =
      MakeActivationTable(config, UnitKind::kBlock, 2, DType::kF32, false);
  const ActivationTable head = MakeActivationTable(config, UnitKind::kHead, 2, DType::kF32, false);
  const int64_t boundary = RoundUp(2 * 7 * 48 * 4, 64);
  EXPECT_EQ(ActivationBytes(config, 2, DType::kF32, false),
            3 * block.kept_bytes + head.kept_bytes +
                std::max(block.scratch_bytes, head.scratch_bytes) + 2 * boundary);
}

int64_t Elements(const std::vector<ActivationInfo>& entries, const std::string& name) {
  for (const ActivationInfo& entry : entries)
    if (entry.name == name) return entry.elements;
  return -1;
}

// One of four ranks keeps a quarter of the rows of its input, its residual and its statistics; what
// its own heads and columns make of all rows stays. So all that a block keeps is divided by t, as
// in Korthikanti et al. 2022, section 4.2.2.
TEST(ActivationTableTest, WhereRowsAreDividedARankKeepsItsOwnRowsAlone) {
  ModelConfig c = Gpt2Small();
  c.heads = c.kv_heads = 3;
  c.intermediate = 768;
  c.vocab = 12565;
  c.tensor = 4;
  const auto of = [&](UnitKind kind, bool checkpointing) {
    return MakeActivationTable(c, kind, 3, DType::kBF16, checkpointing);
  };
  const ActivationTable all = of(UnitKind::kBlock, false), all_head = of(UnitKind::kHead, false);
  const ActivationTable all_ends = of(UnitKind::kEmbedding, false);
  c.sequence_parallel = true;
  const ActivationTable block = of(UnitKind::kBlock, false), head = of(UnitKind::kHead, false);
  const int64_t rows = 3 * 128, own = rows / 4;
  EXPECT_EQ(StreamRows(c, 3), own);
  for (const ActivationInfo& entry : all.kept) {
    const bool stream =
        entry.name == "input" || entry.name == "residual" || entry.name.starts_with("norm_");
    EXPECT_EQ(Elements(block.kept, entry.name), entry.elements / (stream ? 4 : 1)) << entry.name;
  }
  EXPECT_EQ(block.kept_bytes, 10 * rows * 768 / 4 * 2 + 4 * own * 4 + rows * 3 * 4);
  EXPECT_EQ(block.scratch_bytes, all.scratch_bytes);
  EXPECT_EQ(of(UnitKind::kBlock, true).kept_bytes, own * 768 * 2);
  EXPECT_EQ(of(UnitKind::kBlock, true).scratch_bytes,
            block.scratch_bytes + block.kept_bytes - own * 768 * 2);
  // The head has room for the gradient of its gathered input, the embedding for all rows.
  EXPECT_EQ(head.kept_bytes, own * 768 * 2);
  EXPECT_EQ(head.scratch_bytes, all_head.scratch_bytes + rows * 768 * 2 - 2 * (rows - own) * 4);
  EXPECT_EQ(of(UnitKind::kEmbedding, false).scratch_bytes, all_ends.scratch_bytes + rows * 768 * 2);
  EXPECT_EQ(ActivationBytes(c, 3, DType::kBF16, false),
            12 * block.kept_bytes + head.kept_bytes + head.scratch_bytes + 2 * own * 768 * 2);
}

// Of few rows each rank has all.
TEST(ActivationTableTest, InferenceDividesNoRows) {
  ModelConfig c = LlamaOdd();
  c.tensor = 2;
  ModelConfig divided = c;
  divided.sequence_parallel = true;
  for (const UnitKind kind : {UnitKind::kEmbedding, UnitKind::kBlock, UnitKind::kHead}) {
    EXPECT_EQ(MakeDecodeTable(divided, kind, 5, DType::kF32).scratch_bytes,
              MakeDecodeTable(c, kind, 5, DType::kF32).scratch_bytes);
  }
}

// Without tensor ranks there is nobody to divide them with.
TEST(ActivationTableTest, AWholeModelKeepsAllRows) {
  ModelConfig c = LlamaOdd();
  const int64_t bytes = ActivationBytes(c, 2, DType::kF32, false);
  c.sequence_parallel = true;
  EXPECT_EQ(ActivationBytes(c, 2, DType::kF32, false), bytes);
}

TEST(ActivationTableTest, AbsurdSizesSaturateInsteadOfOverflowing) {
  ModelConfig config = LlamaOdd();
  config.hidden = 1 << 16;
  config.intermediate = 1 << 18;
  config.sequence = 1 << 20;
  config.vocab = 1 << 24;
  config.layers = 4096;
  const int64_t bytes = ActivationBytes(config, int64_t{1} << 40, DType::kF32, false);
  EXPECT_GT(bytes, std::numeric_limits<int64_t>::max() - 64);
}

}  // namespace
}  // namespace zeroshard
