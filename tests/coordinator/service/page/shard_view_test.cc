// The shard map as the page shows it.
#include "coordinator/service/page/shard_view.h"

#include <gtest/gtest.h>

#include "common/plan/model_table.h"

namespace zeroshard::coordinator {
namespace {

// An embedding of 40960 x 64 and 16 x 64 elements, 3 chunks; one block and the head, 1 each.
v1::JobSpec Spec(uint32_t replicas) {
  v1::JobSpec spec;
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_architecture("gpt2");
  model.set_hidden_size(64);
  model.set_layers(1);
  model.set_heads(1);
  model.set_sequence_length(16);
  model.set_vocab_size(40960);
  spec.mutable_bf16()->set_enabled(true);
  spec.mutable_optimizer()->set_type("AdamW");
  spec.mutable_store()->set_replicas(replicas);
  return spec;
}

Engine::ShardMap Map(uint32_t replicas, const std::vector<uint32_t>& placement, int stores) {
  Engine::ShardMap shards;
  shards.version = 4;
  shards.spec = Spec(replicas);
  shards.map.set_replicas(replicas);
  shards.map.mutable_placement()->Assign(placement.begin(), placement.end());
  for (int i = 0; i < stores; ++i) {
    auto& store = *shards.map.add_stores();
    store.set_member("store-" + std::to_string(i));
    store.set_host("host");
  }
  return shards;
}

TEST(ShardView, SaysWhichStoreHoldsWhatWithItsBytes) {
  const auto view = ShardView::Make(Map(2, {0, 1, 1, 2, 2, 0, 0, 1, 1, 2}, 3));
  ASSERT_TRUE(view.ok()) << view.status();
  const auto json = view->ToJson(0, 50);
  EXPECT_EQ(json["version"], 4);
  EXPECT_EQ(json["replicas"], 2);
  EXPECT_EQ(json["chunks"], 5);
  EXPECT_EQ(json["cells"], 5);
  EXPECT_EQ(json["stores"][0]["held"], (nlohmann::ordered_json{1, 0, 1, 1, 0}));
  EXPECT_EQ(json["stores"][1]["held"], (nlohmann::ordered_json{1, 1, 0, 1, 1}));
  EXPECT_EQ(json["stores"][2]["chunks"], 3);
  // 4 bytes each of master and two moments, 2 of the parameter, of 2^20 elements.
  EXPECT_EQ(json["rows"][0]["bytes"], 14u << 20);
  EXPECT_EQ(json["rows"][0]["unit"], "embedding");
  EXPECT_EQ(json["rows"][1]["begin"], 1 << 20);
  // 40960 * 64 + 16 * 64 elements, two whole chunks before.
  EXPECT_EQ(json["rows"][2]["end"], 40976 * 64);
  EXPECT_EQ(json["rows"][2]["bytes"], (40976 * 64 - (2 << 20)) * 14);
  EXPECT_EQ(json["rows"][3]["unit"], "blocks.0");
  EXPECT_EQ(json["rows"][3]["stores"], (nlohmann::ordered_json{0, 1}));
  uint64_t rows = 0, stores = 0;
  for (const auto& row : json["rows"]) rows += row["bytes"].get<uint64_t>();
  for (const auto& store : json["stores"]) stores += store["bytes"].get<uint64_t>();
  EXPECT_EQ(stores, 2 * rows);
}

TEST(ShardView, RowsAreAPartThatIsAskedFor) {
  const auto view = ShardView::Make(Map(1, {0, 0, 0, 0, 0}, 1));
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->ToJson(3, 1)["rows"].size(), 1u);
  EXPECT_EQ(view->ToJson(3, 1)["rows"][0]["chunk"], 3);
  EXPECT_EQ(view->ToJson(3, 50)["rows"].size(), 2u);
  EXPECT_EQ(view->ToJson(5, 50)["rows"].size(), 0u);
  EXPECT_EQ(view->ToJson(SIZE_MAX, SIZE_MAX)["rows"].size(), 0u);
  EXPECT_EQ(view->ToJson(0, 0)["rows"].size(), 0u);
}

TEST(ShardView, OfManyChunksHasFewCellsThatCountThemAll) {
  Engine::ShardMap shards = Map(1, {}, 2);
  shards.spec.mutable_model()->set_vocab_size(1 << 23);  // 513 chunks of the embedding
  for (uint32_t i = 0; i < 515; ++i) shards.map.add_placement(i % 2);
  const auto view = ShardView::Make(shards);
  ASSERT_TRUE(view.ok()) << view.status();
  const auto json = view->ToJson(0, 1000);
  EXPECT_EQ(json["cells"], ShardView::kMostCells);
  EXPECT_EQ(json["rows"].size(), ShardView::kMostRows);
  size_t held = 0;
  for (size_t cell = 0; cell < ShardView::kMostCells; ++cell) {
    const size_t here = json["stores"][0]["held"][cell].get<size_t>() +
                        json["stores"][1]["held"][cell].get<size_t>();
    EXPECT_EQ(here, (cell + 1) * 515 / ShardView::kMostCells - cell * 515 / ShardView::kMostCells);
    held += here;
  }
  EXPECT_EQ(held, 515u);
}

TEST(ShardView, AMapThatIsNotTheModelsIsRefused) {
  EXPECT_EQ(ShardView::Make(Map(1, {0, 0, 0}, 1)).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(ShardView::Make(Map(1, {0, 0, 0, 0, 1}, 1)).status().code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace zeroshard::coordinator
