// Which worker takes which rank of a mesh, and what jobs do with fewer or more workers.
#include "coordinator/core/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kGrace = absl::Seconds(30);  // CoreOptions::replacement_grace

std::vector<WorkerRoom> On(const std::vector<std::string>& hosts, uint64_t memory = 0) {
  std::vector<WorkerRoom> rooms;
  for (const std::string& host : hosts) rooms.push_back({"worker", host, true, memory, memory});
  return rooms;
}

std::vector<RankNeed> Of(const std::vector<uint64_t>& bytes) {
  std::vector<RankNeed> needs(bytes.size());
  for (size_t rank = 0; rank < needs.size(); ++rank) {
    needs[rank].plan.set_rank(static_cast<uint32_t>(rank));
    needs[rank].plan.set_parameter_bytes(bytes[rank]);
  }
  return needs;
}

std::vector<RankNeed> Ranks(size_t count) { return Of(std::vector<uint64_t>(count, 1)); }

std::vector<std::string> HostsOf(const std::vector<size_t>& workers,
                                 const std::vector<WorkerRoom>& rooms) {
  std::vector<std::string> hosts;
  for (const size_t worker : workers) hosts.push_back(rooms[worker].host);
  return hosts;
}

TEST(PlaceRanks, TensorGroupsAreOnOneHostHoweverWorkersAreNamed) {
  const auto rooms = On({"a", "b", "a", "b"});
  EXPECT_THAT(PlaceRanks(Ranks(4), rooms, 2), ElementsAre(0, 2, 1, 3));
}

TEST(PlaceRanks, AHostWithTooFewWorkersIsLeftToOthers) {
  // With the first workers in order the groups would be (a, b) and (b, b).
  const auto rooms = On({"a", "b", "b", "b", "b"});
  EXPECT_THAT(PlaceRanks(Ranks(4), rooms, 2), ElementsAre(1, 2, 3, 4));
}

TEST(PlaceRanks, NeighboursAlongTheDataDimensionAreNearEachOther) {
  const auto rooms = On({"a", "a", "a", "a", "b", "b", "b", "b"});
  EXPECT_THAT(HostsOf(PlaceRanks(Ranks(8), rooms, 2), rooms),
              ElementsAre("a", "a", "a", "a", "b", "b", "b", "b"));
}

TEST(PlaceRanks, WhatIsLeftOverIsOnFewHosts) {
  const auto rooms = On({"a", "b", "b", "b", "c", "c"});
  const std::vector<size_t> placed = PlaceRanks(Ranks(6), rooms, 3);
  ASSERT_EQ(placed.size(), 6u);
  EXPECT_EQ(std::set<size_t>(placed.begin(), placed.end()).size(), 6u);
  EXPECT_THAT(HostsOf(placed, rooms), ElementsAre("b", "b", "b", "c", "c", "a"));
}

// Each of three hosts with three workers holds one group of two, so the fourth has to straddle.
TEST(PlaceRanks, AsManyGroupsAsPossibleAreWhole) {
  const auto rooms = On({"a", "b", "c", "a", "b", "c", "a", "b", "c"});
  const std::vector<std::string> hosts = HostsOf(PlaceRanks(Ranks(8), rooms, 2), rooms);
  ASSERT_EQ(hosts.size(), 8u);
  int whole = 0;
  for (size_t first = 0; first < hosts.size(); first += 2)
    whole += hosts[first] == hosts[first + 1];
  EXPECT_EQ(whole, 3);
}

TEST(PlaceRanks, MemoryDecidesBeforeNeighbourhood) {
  // Host a has room for one rank alone.
  auto rooms = On({"a", "a", "b", "b"}, 10);
  rooms[0].host_memory = rooms[1].host_memory = 10;
  rooms[2].host_memory = rooms[3].host_memory = 30;
  rooms[2].device = rooms[3].device = 30;
  EXPECT_THAT(PlaceRanks(Of({8, 8}), rooms, 2), ElementsAre(2, 3));
  EXPECT_THAT(HostsOf(PlaceRanks(Of({10, 10, 10}), rooms, 3), rooms), ElementsAre("a", "b", "b"));
  EXPECT_THAT(PlaceRanks(Of({10, 10, 10, 10}), rooms, 2), IsEmpty());
}

TEST(PlaceRanks, AGroupThatCouldBeWholeIsTornBeforeAJobIsKeptWaiting) {
  // The second group's ranks fit host b's larger workers alone, which the first would take.
  std::vector<WorkerRoom> rooms = On({"a", "b", "b", "a"});
  for (WorkerRoom& room : rooms) room.on_host = false;
  rooms[0].device = rooms[3].device = 5;
  rooms[1].device = rooms[2].device = 9;
  EXPECT_THAT(PlaceRanks(Of({5, 5, 9, 9}), rooms, 2), ElementsAre(0, 3, 1, 2));
  // Host a's workers are of two sizes, as b's are: no group of large ranks is on one host.
  rooms[3].device = 9;
  rooms[2].device = 5;
  const std::vector<size_t> placed = PlaceRanks(Of({5, 5, 9, 9}), rooms, 2);
  ASSERT_EQ(placed.size(), 4u);
  EXPECT_EQ(std::set<size_t>(placed.begin(), placed.end()).size(), 4u);
  for (const size_t rank : {2, 3}) EXPECT_EQ(rooms[placed[rank]].device, 9u);
}

TEST(PlaceRanks, NothingWhereThereAreTooFew) {
  EXPECT_THAT(PlaceRanks(Ranks(4), On({"a", "a", "b"}), 2), IsEmpty());
  EXPECT_THAT(PlaceRanks(Ranks(3), On({"a", "a", "b"}), 2), IsEmpty()) << "no whole groups";
}

TEST(DescribePlacement, SaysWhatIsApart) {
  EXPECT_EQ(DescribePlacement({"a", "b"}, 1), "");
  EXPECT_EQ(DescribePlacement({"a", "a"}, 2), "the tensor group is on one host");
  EXPECT_EQ(DescribePlacement({"a", "a", "b", "b"}, 2), "each of 2 tensor groups is on one host");
  EXPECT_THAT(DescribePlacement({"a", "a", "c", "b"}, 2),
              AllOf(HasSubstr("1 of 2 tensor groups is on several hosts"),
                    HasSubstr("ranks 2 to 3 are on b, c")));
}

v1::JobSpec Meshed(uint32_t workers, uint32_t least, uint32_t tensor, uint32_t pipeline) {
  v1::JobSpec spec = Harness::SavingSpec("a", workers);
  spec.mutable_resources()->set_min_workers(least);
  spec.mutable_parallel()->set_tensor(tensor);
  spec.mutable_parallel()->set_pipeline(pipeline);
  return spec;
}

TEST(MeshJobs, AnAssignmentCarriesTheMeshAndTheStatusShowsIt) {
  Harness h;
  for (int i = 0; i < 8; ++i) h.Join(absl::StrCat("worker-", i), i % 2 == 0 ? "host-a" : "host-b");
  h.SubmitJob(Meshed(8, 8, 2, 2));
  const v1::Assign& assign = *h.member("worker-0").assign;
  EXPECT_EQ(assign.mesh().pipeline(), 2);
  EXPECT_EQ(assign.mesh().data(), 2);
  EXPECT_EQ(assign.mesh().tensor(), 2);
  EXPECT_EQ(assign.spec().parallel().tensor(), 2);
  // The peers of a tensor group are on one host although names alternate.
  for (int rank = 0; rank < 8; rank += 2)
    EXPECT_EQ(assign.peers(rank).host(), assign.peers(rank + 1).host());
  const v1::JobStatus status = h.Status("a");
  EXPECT_EQ(status.mesh().data(), 2);
  EXPECT_EQ(status.placement(), "each of 4 tensor groups is on one host");
  EXPECT_THAT(status.reason(), HasSubstr("each of 4 tensor groups is on one host"));
  ASSERT_EQ(status.ranks_size(), 8);
  EXPECT_EQ(status.ranks(5).position().pipeline(), 1);
  EXPECT_EQ(status.ranks(5).position().data(), 0);
  EXPECT_EQ(status.ranks(5).position().tensor(), 1);
}

TEST(MeshJobs, AGroupOnSeveralHostsIsSaid) {
  Harness h;
  h.Join("worker-0", "host-a");
  h.Join("worker-1", "host-b");
  h.SubmitJob(Meshed(2, 2, 2, 1));
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("ranks 0 to 1 are on host-a, host-b"));
  EXPECT_THAT(h.Status("a").placement(), HasSubstr("1 of 1 tensor group is on several hosts"));
}

TEST(MeshJobs, WithFewerWorkersAJobGoesOnWithWholeReplicas) {
  Harness h;
  h.JoinMany(7);
  h.SubmitJob(Meshed(12, 4, 2, 2));
  const std::vector<std::string> all = {"worker-0", "worker-1", "worker-2", "worker-3",
                                        "worker-4", "worker-5", "worker-6"};
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_QUEUED);
  h.AdvanceBeating(kGrace + absl::Seconds(1), all);
  ASSERT_TRUE(h.member("worker-0").assign.has_value()) << h.Status("a").reason();
  EXPECT_EQ(h.member("worker-0").assign->world_size(), 4) << "7 workers hold one replica of 4";
  EXPECT_EQ(h.member("worker-0").assign->mesh().data(), 1);
  EXPECT_FALSE(h.member("worker-4").assign.has_value());
}

TEST(MeshJobs, WithLessThanAReplicaItWaits) {
  Harness h;
  h.JoinMany(3);
  h.SubmitJob(Meshed(8, 4, 2, 2));
  h.AdvanceBeating(kGrace * 2, {"worker-0", "worker-1", "worker-2"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("it can go on with 4"));
  h.Join("worker-3");
  EXPECT_EQ(h.member("worker-3").assign->world_size(), 4);
}

}  // namespace
}  // namespace zeroshard::coordinator
