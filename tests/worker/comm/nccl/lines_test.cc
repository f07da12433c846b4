#include "tests/worker/comm/mesh_lines.h"
#include "tests/worker/comm/nccl/nccl_ranks.h"

namespace zeroshard {
namespace {

using ::testing::UnorderedElementsAre;

TEST(NcclLines, AreCommunicatorsWithAnIdEach) {
  FakeNccl nccl;
  const std::unique_ptr<Device> device = MakeCpuDevice();
  MemoryRendezvous generation;
  const CommunicatorMaker make = [&](const CommunicatorOptions& options, Rendezvous* rendezvous,
                                     Device* on) {
    return MakeNcclCommunicator(options, NcclTuning{}, nccl.Api(), rendezvous, on);
  };
  {
    std::vector<RankLines> lines = MakeMeshLines(&generation, device.get(), make);
    for (const RankLines& rank : lines) {
      ASSERT_TRUE(rank.tensor.ok()) << rank.tensor.status();
      ASSERT_TRUE(rank.data.ok()) << rank.data.status();
    }
    EXPECT_THAT(generation.Keys(),
                UnorderedElementsAre("data/0/nccl/0", "data/0/nccl/1", "data/1/nccl/0",
                                     "data/1/nccl/1", "tensor/0/nccl/0", "tensor/0/nccl/1",
                                     "tensor/1/nccl/0", "tensor/1/nccl/1"));
    std::set<std::string> ids;
    for (const char* line : {"data/0", "data/1", "tensor/0", "tensor/1"})
      ids.insert(*generation.Get(std::string(line) + "/nccl/0", absl::ZeroDuration()));
    EXPECT_EQ(ids.size(), 4u);
    ExpectGathers(lines);
    // The others' ranks would take the old id; the first does not come a second time.
    EXPECT_EQ(MakeLineCommunicator(DataLine(1), MeshOptions(1), &generation, device.get(), make)
                  .status()
                  .code(),
              absl::StatusCode::kAlreadyExists);
    // Each waits for the rest of its line.
    std::vector<std::thread> threads;
    for (RankLines& rank : lines) {
      threads.emplace_back([&rank] {
        rank.tensor = absl::CancelledError();
        rank.data = absl::CancelledError();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_THAT(nccl.violations(), ::testing::IsEmpty());
}

}  // namespace
}  // namespace zeroshard
