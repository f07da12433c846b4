#include "coordinator/core/stores.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

StoreNeeds Needs(std::vector<uint64_t> chunks, uint32_t replicas = 1) {
  StoreNeeds needs;
  needs.chunks = std::move(chunks);
  needs.bytes = std::accumulate(needs.chunks.begin(), needs.chunks.end(), uint64_t{0});
  needs.replicas = replicas;
  return needs;
}

std::vector<StoreRoom> Rooms(const std::vector<uint64_t>& free, bool one_host = false) {
  std::vector<StoreRoom> rooms;
  for (size_t i = 0; i < free.size(); ++i) {
    rooms.push_back(
        {absl::StrCat("store-", i), one_host ? "host" : absl::StrCat("host-", i), free[i], 0});
  }
  return rooms;
}

std::vector<uint64_t> Loads(const StoreNeeds& needs, const std::vector<uint32_t>& placement,
                            size_t rooms) {
  std::vector<uint64_t> loads(rooms, 0);
  const size_t replicas = placement.size() / needs.chunks.size();
  for (size_t place = 0; place < placement.size(); ++place) {
    loads[placement[place]] += needs.chunks[place / replicas];
  }
  return loads;
}

TEST(PlaceChunks, EveryStoreGetsItsShareInOneRun) {
  const StoreNeeds needs = Needs(std::vector<uint64_t>(12, 10));
  const auto placement = PlaceChunks(needs, 1, Rooms({1000, 1000, 1000}));
  ASSERT_TRUE(placement.ok()) << placement.status();
  EXPECT_THAT(*placement, ElementsAre(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2));
}

TEST(PlaceChunks, ASmallStoreGetsWhatItCanHold) {
  const StoreNeeds needs = Needs(std::vector<uint64_t>(12, 10));
  const auto placement = PlaceChunks(needs, 1, Rooms({1000, 25, 1000}));
  ASSERT_TRUE(placement.ok()) << placement.status();
  const std::vector<uint64_t> loads = Loads(needs, *placement, 3);
  EXPECT_LE(loads[1], 25);
  EXPECT_LE(std::max(loads[0], loads[2]) - std::min(loads[0], loads[2]), 10);
}

TEST(PlaceChunks, WhatIsTakenByOthersIsNotFree) {
  std::vector<StoreRoom> rooms = Rooms({100, 100});
  rooms[0].taken = 95;
  const auto placement = PlaceChunks(Needs({10, 10, 10}), 1, rooms);
  ASSERT_TRUE(placement.ok()) << placement.status();
  EXPECT_THAT(*placement, Each(1));
}

TEST(PlaceChunks, RefusesWithTheNumbers) {
  std::vector<StoreRoom> rooms = Rooms({1000000, 2000000});
  rooms[1].taken = 500000;
  const auto placement = PlaceChunks(Needs({2000000, 2000000}), 1, rooms);
  EXPECT_EQ(placement.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(placement.status().message(),
              AllOf(HasSubstr("4.0 MB"), HasSubstr("2.5 MB are free of 3.0 MB on 2 stores")));
}

TEST(PlaceChunks, StoresWithoutAnNvmeFolderAreToldTheOption) {
  StoreNeeds needs = Needs({2000000});
  needs.nvme = true;
  EXPECT_THAT(PlaceChunks(needs, 1, Rooms({0, 0})).status().message(),
              AllOf(HasSubstr("of the stores' NVMe folders"), HasSubstr("--nvme-dir")));
  // One has a folder that is too small: it is not the option that is missing.
  EXPECT_THAT(PlaceChunks(needs, 1, Rooms({0, 1000000})).status().message(),
              ::testing::Not(HasSubstr("--nvme-dir")));
}

TEST(PlaceChunks, FewerStoresThanReplicasAreSaid) {
  const auto placement = PlaceChunks(Needs({10}), 2, Rooms({1000}));
  EXPECT_THAT(placement.status().message(), HasSubstr("at least 2 are wanted"));
}

TEST(PlaceChunks, AFullClusterIsFilledToTheLastChunk) {
  const StoreNeeds needs = Needs({10, 10, 10, 10, 10, 10});
  const auto placement = PlaceChunks(needs, 2, Rooms({40, 40, 40}));
  ASSERT_TRUE(placement.ok()) << placement.status();
  EXPECT_THAT(Loads(needs, *placement, 3), Each(40));
}

class Placements : public ::testing::TestWithParam<uint32_t> {};

// Against the rules themselves: distinct stores, distinct hosts, no store beyond its room.
TEST_P(Placements, KeepTheRules) {
  uint64_t seed = GetParam();
  const auto next = [&seed](uint64_t below) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (seed >> 33) % below;
  };
  for (int round = 0; round < 200; ++round) {
    std::vector<uint64_t> chunks(1 + next(40));
    for (uint64_t& bytes : chunks) bytes = next(4) == 0 ? 1 + next(1000) : 1000;
    const uint32_t replicas = 1 + static_cast<uint32_t>(next(3));
    std::vector<uint64_t> free(replicas + next(5));
    for (uint64_t& bytes : free) bytes = next(60000);
    std::vector<StoreRoom> rooms = Rooms(free);
    const uint64_t hosts = 1 + next(free.size());
    for (size_t i = 0; i < rooms.size(); ++i) rooms[i].host = absl::StrCat("h", i % hosts);
    const StoreNeeds needs = Needs(chunks, replicas);
    const auto placement = PlaceChunks(needs, replicas, rooms);
    uint64_t could = 0;  // an upper bound, beyond which nothing fits
    for (const uint64_t bytes : free) could += std::min(bytes, needs.bytes);
    if (!placement.ok()) {
      // Chunks are not cut: what is refused is at most a chunk a store short of the bound.
      EXPECT_LT(could, needs.bytes * replicas + 1000 * (free.size() + replicas))
          << "round " << round;
      continue;
    }
    ASSERT_GE(could, needs.bytes * replicas);
    ASSERT_EQ(placement->size(), chunks.size() * replicas);
    const std::vector<uint64_t> loads = Loads(needs, *placement, rooms.size());
    for (size_t i = 0; i < rooms.size(); ++i) EXPECT_LE(loads[i], free[i]);
    bool apart = true;
    for (size_t chunk = 0; chunk < chunks.size(); ++chunk) {
      std::set<uint32_t> stores;
      std::set<std::string> names;
      for (uint32_t r = 0; r < replicas; ++r) {
        const uint32_t room = (*placement)[chunk * replicas + r];
        stores.insert(room);
        names.insert(rooms[room].host);
      }
      EXPECT_EQ(stores.size(), replicas);
      apart &= names.size() == replicas;
    }
    const bool plenty = *std::min_element(free.begin(), free.end()) >= needs.bytes;
    EXPECT_TRUE(apart || !plenty || hosts < replicas) << "round " << round;
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, Placements, ::testing::Range(1u, 9u));

TEST(RepairPlacement, OnlyWhatIsMissingMoves) {
  // store-2 died: chunks 1 and 2 have lost one of two copies.
  const std::vector<std::vector<uint32_t>> holders = {{0, 1}, {1}, {0}, {1, 0}};
  const auto placement =
      RepairPlacement(Needs({10, 10, 10, 10}, 2), 2, Rooms({90, 90, 90}), holders);
  ASSERT_TRUE(placement.ok()) << placement.status();
  EXPECT_THAT(*placement, ElementsAre(0, 1, 1, 2, 0, 2, 1, 0));
}

TEST(RepairPlacement, WithFewerReplicasAHolderStays) {
  const std::vector<std::vector<uint32_t>> holders = {{0, 1}, {1, 0}};
  const auto placement = RepairPlacement(Needs({10, 10}, 2), 1, Rooms({90, 90}), holders);
  ASSERT_TRUE(placement.ok()) << placement.status();
  EXPECT_EQ(std::set<uint32_t>(placement->begin(), placement->end()).size(), 2);
}

TEST(RepairPlacement, PrefersAnotherHost) {
  std::vector<StoreRoom> rooms = Rooms({90, 90, 90});
  rooms[1].host = rooms[0].host;
  const auto placement = RepairPlacement(Needs({10}, 2), 2, rooms, {{0}});
  ASSERT_TRUE(placement.ok()) << placement.status();
  EXPECT_THAT(*placement, ElementsAre(0, 2));
}

v1::StoreReport Ready(uint64_t step) {
  v1::StoreReport report;
  report.set_phase(v1::STORE_PHASE_READY);
  report.set_generation(2);
  report.set_map_version(3);
  report.mutable_version()->set_epoch(1);
  report.mutable_version()->set_step(step);
  report.set_sealed_step(step + 1);
  return report;
}

TEST(WhatLacks, NamesWhatIsSeenAndWanted) {
  const WantedOfStore wanted{2, 3, 1, 7, 8};
  EXPECT_EQ(WhatLacks(Ready(7), wanted), "");
  v1::StoreReport report = Ready(7);
  report.set_sealed_step(0);
  EXPECT_THAT(WhatLacks(report, wanted), HasSubstr("lacks gradients of step 8"));
  EXPECT_EQ(WhatLacks(report, {2, 3, 1, 7, 0}), "");
  EXPECT_THAT(WhatLacks(Ready(6), wanted), HasSubstr("step 6; wanted step 7"));
  report = Ready(7);
  report.set_generation(1);
  EXPECT_THAT(WhatLacks(report, wanted), HasSubstr("generation 1 open; wanted 2"));
  report = Ready(7);
  report.set_map_version(2);
  EXPECT_THAT(WhatLacks(report, wanted), HasSubstr("map 2; wanted epoch 1 and map 3"));
  report = Ready(7);
  report.mutable_version()->set_epoch(0);
  EXPECT_THAT(WhatLacks(report, wanted), HasSubstr("epoch 0"));
  report = Ready(7);
  report.set_phase(v1::STORE_PHASE_APPLYING);
  EXPECT_THAT(WhatLacks(report, wanted), HasSubstr("applying"));
  report.set_phase(v1::STORE_PHASE_LOADING);
  EXPECT_THAT(WhatLacks(report, wanted), HasSubstr("loading"));
  report.set_phase(v1::STORE_PHASE_FAILED);
  report.set_problem("disk on fire");
  EXPECT_THAT(WhatLacks(report, wanted), HasSubstr("disk on fire"));
  EXPECT_THAT(WhatLacks(v1::StoreReport(), wanted), HasSubstr("nothing"));
}

TEST(CompareDigests, NamesChunkAndBothStores) {
  v1::StoreMap map;
  map.set_replicas(2);
  for (int i = 0; i < 3; ++i) {
    map.add_stores()->set_member(absl::StrCat("store-", i));
    map.mutable_stores(i)->set_host("h");
  }
  for (const uint32_t store : {0, 1, 1, 2, 2, 0}) map.add_placement(store);
  v1::StoreReport a, b, c;  // chunks 0, 2; 0, 1; 1, 2
  for (const uint32_t digest : {10, 12}) a.add_chunk_digests(digest);
  for (const uint32_t digest : {10, 11}) b.add_chunk_digests(digest);
  for (const uint32_t digest : {11, 12}) c.add_chunk_digests(digest);
  EXPECT_EQ(CompareDigests(map, {&a, &b, &c}), "");
  c.set_chunk_digests(1, 13);
  EXPECT_THAT(CompareDigests(map, {&a, &b, &c}),
              AllOf(HasSubstr("chunk 2"), HasSubstr("store-0 on h"), HasSubstr("store-2 on h"),
                    HasSubstr("0000000c"), HasSubstr("0000000d")));
  c.clear_chunk_digests();
  EXPECT_EQ(CompareDigests(map, {&a, &b, &c}), "");
  EXPECT_EQ(CompareDigests(map, {&a, nullptr, nullptr}), "");
}

TEST(ChunksOfStores, AreThoseOfThePlacement) {
  v1::StoreMap map;
  map.set_replicas(1);
  map.add_stores();
  map.add_stores();
  for (const uint32_t store : {0, 1, 0}) map.add_placement(store);
  EXPECT_THAT(ChunksOfStores(map), ElementsAre(ElementsAre(0, 2), ElementsAre(1)));
  EXPECT_THAT(ChunksOfStores(v1::StoreMap()), IsEmpty());
}

}  // namespace
}  // namespace zeroshard::coordinator
