// The communicators of each rank of a mesh, over Gloo, ranks as threads.
#include "worker/agent/mesh_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/status_payloads.h"
#include "worker/comm/memory_rendezvous.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Mesh {
  explicit Mesh(const MeshShape& of, int copies = 1) : shape(of) {
    const auto ranks = static_cast<size_t>(shape.Ranks());
    links.resize(ranks);
    status.resize(ranks);
    Each([&](int rank) {
      CommunicatorOptions options;
      options.rank = rank;
      options.size = shape.Ranks();
      options.host = "127.0.0.1";
      options.operation_timeout = absl::Seconds(20);
      const CommunicatorMaker make = [](const CommunicatorOptions& line, Rendezvous* at,
                                        Device* on) { return MakeGlooCommunicator(line, at, on); };
      auto made = MakeMeshLinks(shape, copies, options, &rendezvous, device.get(), make);
      status[static_cast<size_t>(rank)] = made.status();
      if (made.ok()) links[static_cast<size_t>(rank)] = *std::move(made);
    });
  }
  void Each(const std::function<void(int rank)>& work) const {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < shape.Ranks(); ++rank) threads.emplace_back(work, rank);
    for (std::thread& thread : threads) thread.join();
  }

  const MeshShape shape;
  std::unique_ptr<Device> device = MakeCpuDevice();
  MemoryRendezvous rendezvous;
  std::vector<MeshLinks> links;
  std::vector<absl::Status> status;
};

// What the ranks of a line sum to says who is in it.
float SumOf(Communicator* line, int rank) {
  float value = static_cast<float>(1 << rank);
  EXPECT_TRUE(line->AllReduce(&value, 1, DType::kF32, {}, {}).Wait().ok());
  return value;
}

float Members(const std::vector<int>& ranks) {
  float sum = 0;
  for (const int rank : ranks) sum += static_cast<float>(1 << rank);
  return sum;
}

TEST(MeshLinks, EachLineHasItsRanksAndEachRankItsLines) {
  const Mesh mesh({.pipeline = 2, .data = 2, .tensor = 2}, /*copies=*/2);
  for (const absl::Status& status : mesh.status) ASSERT_TRUE(status.ok()) << status;
  mesh.Each([&](int rank) {
    const MeshLinks& links = mesh.links[static_cast<size_t>(rank)];
    EXPECT_EQ(SumOf(links.job.get(), rank), 255);
    EXPECT_EQ(SumOf(links.DataLine(), rank),
              Members(LineOf(mesh.shape, MeshDimension::kData, rank)));
    EXPECT_EQ(SumOf(links.tensor.get(), rank),
              Members(LineOf(mesh.shape, MeshDimension::kTensor, rank)));
    EXPECT_EQ(SumOf(links.copies.get(), rank),
              Members(LineOf(mesh.shape, MeshDimension::kTensor, rank)));
    EXPECT_EQ(SumOf(links.pipeline.get(), rank),
              Members(LineOf(mesh.shape, MeshDimension::kPipeline, rank)));
    // A rank's place in a line is its index, as TrainerMesh wants it.
    const MeshPosition at = PositionOf(mesh.shape, rank);
    EXPECT_EQ(links.DataLine()->rank(), at.data);
    EXPECT_EQ(links.tensor->rank(), at.tensor);
    EXPECT_EQ(links.pipeline->rank(), at.pipeline);
    EXPECT_EQ(links.job->rank(), rank);
    EXPECT_EQ(links.Traffic().size(), 5u);
    const TrainerMesh trainer = links.ForTrainer(mesh.shape);
    EXPECT_EQ(trainer.shape.Ranks(), 8);
    EXPECT_EQ(trainer.job, links.job.get());
    EXPECT_EQ(trainer.copies, links.copies.get());
  });
}

TEST(MeshLinks, AJobWithoutAMeshHasOneCommunicatorAsBefore) {
  const Mesh mesh({.pipeline = 1, .data = 2, .tensor = 1});
  for (const MeshLinks& links : mesh.links) {
    ASSERT_NE(links.job, nullptr);
    EXPECT_EQ(links.All().size(), 1u);
    EXPECT_EQ(links.DataLine(), links.job.get());
    const TrainerMesh trainer = links.ForTrainer(mesh.shape);
    EXPECT_EQ(trainer.job, nullptr);
    EXPECT_EQ(trainer.shape.Ranks(), 1);
  }
  std::vector<std::string> keys = mesh.rendezvous.Keys();
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(keys, (std::vector<std::string>{"gloo/0", "gloo/1"}));
}

TEST(MeshLinks, AbortEndsTheWaitsOfEveryLine) {
  const Mesh mesh({.pipeline = 2, .data = 1, .tensor = 2});
  for (const absl::Status& status : mesh.status) ASSERT_TRUE(status.ok()) << status;
  // Rank 0 waits for peers on all its lines, none of which takes part.
  const MeshLinks& links = mesh.links[0];
  float values[3] = {};
  std::vector<Event> waits = {links.job->AllReduce(&values[0], 1, DType::kF32, {}, {}),
                              links.tensor->AllReduce(&values[1], 1, DType::kF32, {}, {}),
                              links.pipeline->AllReduce(&values[2], 1, DType::kF32, {}, {})};
  links.Abort("rank 3 is gone");
  for (Event& wait : waits) EXPECT_EQ(wait.Wait().code(), absl::StatusCode::kAborted);
}

// The coordinator is told of a rank of the job, not of a place in a line.
TEST(MeshLinks, WhoLeavesIsBlamedByItsRankInTheJob) {
  Mesh mesh({.pipeline = 2, .data = 1, .tensor = 2});
  for (const absl::Status& status : mesh.status) ASSERT_TRUE(status.ok()) << status;
  mesh.links[3] = MeshLinks();
  for (const auto& [rank, line] : {std::pair<int, Communicator*>{2, mesh.links[2].tensor.get()},
                                   {1, mesh.links[1].pipeline.get()}}) {
    float value = 0;
    const absl::Status status = line->AllReduce(&value, 1, DType::kF32, {}, {}).Wait();
    EXPECT_EQ(BlamedRank(status), 3u) << rank << ": " << status;
  }
  float value = 0;
  EXPECT_THAT(
      std::string(mesh.links[2].tensor->AllReduce(&value, 1, DType::kF32, {}, {}).Wait().message()),
      AllOf(HasSubstr("tensor line 1 (ranks 2, 3 of the job)"), HasSubstr("rank 1")));
}

}  // namespace
}  // namespace zeroshard
