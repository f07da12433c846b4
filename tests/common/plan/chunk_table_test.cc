#include "common/plan/chunk_table.h"

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

ModelTable Model(std::vector<int64_t> lengths) {
  ModelTable model;
  for (const int64_t length : lengths) {
    UnitTable& unit = model.units.emplace_back();
    unit.length = length;
    unit.parameters.push_back({.name = "w", .shape = {length}, .size = length});
  }
  return model;
}

TEST(ChunkTable, CutsEachUnitApart) {
  const ChunkTable table = ChunkTable::Make(Model({3 * kChunkElements, 64, kChunkElements + 64}));
  ASSERT_EQ(table.chunks.size(), 6u);
  EXPECT_EQ(table.first, (std::vector<int>{0, 3, 4, 6}));
  const struct {
    int unit;
    int64_t begin, end;
  } expected[] = {
      {0, 0, 1048576}, {0, 1048576, 2097152}, {0, 2097152, 3145728},
      {1, 0, 64},      {2, 0, 1048576},       {2, 1048576, 1048640},
  };
  for (size_t c = 0; c < 6; ++c) {
    EXPECT_EQ(table.chunks[c].unit, expected[c].unit) << c;
    EXPECT_EQ(table.chunks[c].begin, expected[c].begin) << c;
    EXPECT_EQ(table.chunks[c].end, expected[c].end) << c;
  }
}

TEST(ChunkTable, ChunksTileEveryUnitAndAreFoundByTheirElements) {
  for (const int64_t chunk : {1, 64, 100, 128, 1000}) {
    for (const int64_t length : {1, 64, 99, 100, 101, 128, 1000}) {
      const ModelTable model = Model({length, 7, length});
      const ChunkTable table = ChunkTable::Make(model, chunk);
      EXPECT_EQ(ChunkCount(model, chunk), static_cast<int64_t>(table.chunks.size()));
      ASSERT_EQ(table.first.size(), 4u);
      EXPECT_EQ(table.first.back(), static_cast<int>(table.chunks.size()));
      for (int u = 0; u < 3; ++u) {
        int64_t next = 0;
        for (int c = table.first[static_cast<size_t>(u)];
             c < table.first[static_cast<size_t>(u) + 1]; ++c) {
          const Chunk& one = table.chunks[static_cast<size_t>(c)];
          EXPECT_EQ(one.unit, u);
          EXPECT_EQ(one.begin, next);
          EXPECT_GT(one.size(), 0);
          EXPECT_LE(one.size(), chunk);
          EXPECT_EQ(table.Find(u, one.begin), c);
          EXPECT_EQ(table.Find(u, one.end - 1), c);
          next = one.end;
        }
        EXPECT_EQ(next, model.units[static_cast<size_t>(u)].length);
      }
    }
  }
}

// Of a model: no ranks or stores come in, and what is trained is what its unit says.
TEST(ChunkTable, AUnitWithOneTrainedTensorIsStagedWhole) {
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(64);
  spec.set_layers(2);
  spec.set_heads(2);
  spec.set_sequence_length(16);
  spec.set_vocab_size(256);
  spec.add_trainable("blocks.1.ln_1.bias");
  const absl::StatusOr<ModelTable> model = MakeModelTable(spec);
  ASSERT_TRUE(model.ok()) << model.status();
  const ChunkTable table = ChunkTable::Make(*model, 10'000);
  for (const Chunk& chunk : table.chunks) EXPECT_EQ(chunk.trained, chunk.unit == 2) << chunk.unit;
  // A block is 12 C^2 + 13 C elements, of which every tensor begins at a multiple of 64.
  EXPECT_EQ(table.first[3] - table.first[2], (12 * 64 * 64 + 13 * 64 + 9'999) / 10'000);
}

TEST(BytesOf, CountsTwelveBytesOfStateAndWhatTravels) {
  const Chunk chunk{.begin = 100, .end = 1100};
  ChunkBytes bytes = BytesOf(chunk, DType::kBF16, false);
  EXPECT_EQ(bytes.master, 4000u);
  EXPECT_EQ(bytes.exp_avg, 4000u);
  EXPECT_EQ(bytes.exp_avg_sq, 4000u);
  EXPECT_EQ(bytes.parameters, 2000u);
  EXPECT_EQ(bytes.staging, 2000u);
  EXPECT_EQ(bytes.State(), 14'000u);
  EXPECT_EQ(bytes.Total(), 16'000u);
  bytes = BytesOf(chunk, DType::kF32, false);
  EXPECT_EQ(bytes.parameters, 0u);  // the master weights are them
  EXPECT_EQ(bytes.staging, 4000u);
  EXPECT_EQ(bytes.State(), 12'000u);
}

TEST(BytesOf, SgdKeepsOneMoment) {
  const ChunkBytes bytes = BytesOf({.end = 64}, DType::kBF16, true);
  EXPECT_EQ(bytes.exp_avg, 256u);
  EXPECT_EQ(bytes.exp_avg_sq, 0u);
  EXPECT_EQ(bytes.Total(), 64u * (4 + 4 + 2 + 2));
}

TEST(BytesOf, FrozenChunksKeepParametersAlone) {
  const Chunk frozen{.end = 1000, .trained = false};
  EXPECT_EQ(BytesOf(frozen, DType::kBF16, false).Total(), 2000u);
  EXPECT_EQ(BytesOf(frozen, DType::kBF16, false).parameters, 2000u);
  EXPECT_EQ(BytesOf(frozen, DType::kF32, false).Total(), 4000u);
  EXPECT_EQ(BytesOf(frozen, DType::kF32, false).master, 4000u);
}

TEST(BytesOf, AChunkOfOneElement) {
  EXPECT_EQ(BytesOf({.begin = 5, .end = 6}, DType::kBF16, false).Total(), 16u);
}

}  // namespace
}  // namespace zeroshard
