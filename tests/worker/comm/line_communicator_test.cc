#include "worker/comm/line_communicator.h"

#include "tests/worker/comm/mesh_lines.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

TEST(LineCommunicators, OverGlooAreMadeForEachLineOfAMesh) {
  const std::unique_ptr<Device> device = MakeCpuDevice();
  MemoryRendezvous generation;
  std::vector<RankLines> lines = MakeMeshLines(&generation, device.get(), MakeGlooCommunicator);
  for (const RankLines& rank : lines) {
    ASSERT_TRUE(rank.tensor.ok()) << rank.tensor.status();
    ASSERT_TRUE(rank.data.ok()) << rank.data.status();
  }
  EXPECT_THAT(generation.Keys(),
              UnorderedElementsAre("data/0/gloo/0", "data/0/gloo/1", "data/1/gloo/0",
                                   "data/1/gloo/1", "tensor/0/gloo/0", "tensor/0/gloo/1",
                                   "tensor/1/gloo/0", "tensor/1/gloo/1"));
  ExpectGathers(lines);
}

TEST(LineCommunicators, ALineOfOneGenerationIsMadeOnce) {
  const std::unique_ptr<Device> device = MakeCpuDevice();
  MemoryRendezvous generation;
  const std::vector<RankLines> lines =
      MakeMeshLines(&generation, device.get(), MakeGlooCommunicator);
  const absl::Status again = MakeLineCommunicator(TensorLine(3), MeshOptions(3), &generation,
                                                  device.get(), MakeGlooCommunicator)
                                 .status();
  EXPECT_EQ(again.code(), absl::StatusCode::kAlreadyExists) << again;
  EXPECT_THAT(std::string(again.message()),
              AllOf(HasSubstr("line 1 of dimension \"tensor\" (ranks 2, 3)"),
                    HasSubstr("tensor/1/gloo/1")));
}

TEST(LineCommunicators, ALineOfOneRankNeedsNobody) {
  const std::unique_ptr<Device> device = MakeCpuDevice();
  const auto alone = MakeLineCommunicator({"pipeline", 2, {2}}, MeshOptions(2), nullptr,
                                          device.get(), MakeGlooCommunicator);
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ((*alone)->size(), 1);
  EXPECT_EQ((*alone)->rank(), 0);
}

TEST(LineCommunicators, WhoDoesNotComeIsNamedWithTheLine) {
  const std::unique_ptr<Device> device = MakeCpuDevice();
  MemoryRendezvous generation;
  CommunicatorOptions job = MeshOptions(2);
  job.connect_timeout = absl::Milliseconds(100);
  const absl::Status status =
      MakeLineCommunicator(TensorLine(2), job, &generation, device.get(), MakeGlooCommunicator)
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("line 1 of dimension \"tensor\" (ranks 2, 3)"), HasSubstr("rank 1")));
}

TEST(LineCommunicators, ListsThatCannotBeAreRefused) {
  const std::unique_ptr<Device> device = MakeCpuDevice();
  MemoryRendezvous generation;
  const auto refusal = [&](const MeshLine& line) {
    const absl::Status status =
        MakeLineCommunicator(line, MeshOptions(1), &generation, device.get(), MakeGlooCommunicator)
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal({"tensor", 0, {1, 4}}), HasSubstr("rank 4 is none of the job's 4"));
  EXPECT_THAT(refusal({"tensor", 0, {1, -1}}), HasSubstr("rank -1 is none"));
  EXPECT_THAT(refusal({"tensor", 0, {1, 0, 1}}), HasSubstr("rank 1 is there twice"));
  EXPECT_THAT(refusal({"tensor", 0, {0, 2}}), HasSubstr("rank 1, which asks for it, is not in it"));
  EXPECT_THAT(refusal({"tensor", 0, {}}), HasSubstr("is not in it"));
  EXPECT_THAT(refusal({"", 0, {1}}), HasSubstr("a dimension of small letters"));
  EXPECT_THAT(refusal({"a/b", 0, {1}}), HasSubstr("a dimension of small letters"));
  EXPECT_THAT(refusal({"data", -1, {1}}), HasSubstr("counts from 0"));
  EXPECT_TRUE(generation.Keys().empty());
}

}  // namespace
}  // namespace zeroshard
