#include <algorithm>
#include <map>
#include <set>

#include "common/plan/rank_mesh.h"
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

constexpr MeshShape kCube{.pipeline = 2, .data = 2, .tensor = 2};
const std::pair<const char*, MeshDimension> kDimensions[] = {
    {"tensor", MeshDimension::kTensor},
    {"data", MeshDimension::kData},
    {"pipeline", MeshDimension::kPipeline}};

// Eight ranks, each with its three lines, of one generation.
class Cube {
 public:
  using Lines = std::map<std::string, std::unique_ptr<Communicator>>;

  explicit Cube(FakeNccl* nccl) : device_(MakeCpuDevice()), lines_(kCube.Ranks()) {
    Each([&](int rank) {
      const auto order = std::make_shared<LaunchOrder>();
      const CommunicatorMaker make = [&](const CommunicatorOptions& options, Rendezvous* rendezvous,
                                         Device* on) {
        return MakeNcclCommunicator(options, NcclTuning{.order = order}, nccl->Api(rank),
                                    rendezvous, on);
      };
      CommunicatorOptions job = MeshOptions(rank);
      job.size = kCube.Ranks();
      for (const auto& [name, dimension] : kDimensions) {
        auto made =
            MakeLineCommunicator({name, NumberOf(dimension, rank), LineOf(kCube, dimension, rank)},
                                 job, &generation, device_.get(), make);
        ASSERT_TRUE(made.ok()) << made.status();
        lines_[static_cast<size_t>(rank)][name] = *std::move(made);
      }
    });
  }
  // As ranks that are done: each waits for the rest of its line.
  ~Cube() {
    Each([this](int rank) { lines_[static_cast<size_t>(rank)].clear(); });
  }

  static int NumberOf(MeshDimension dimension, int rank) {
    const std::vector<std::vector<int>> all = LinesOf(kCube, dimension);
    const auto own = std::ranges::find(all, LineOf(kCube, dimension, rank));
    return static_cast<int>(own - all.begin());
  }
  static void Each(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kCube.Ranks(); ++rank)
      threads.emplace_back([&body, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }
  Lines& operator[](int rank) { return lines_[static_cast<size_t>(rank)]; }

  // The id of every line, as its first rank published it.
  std::vector<std::string> Ids() {
    std::vector<std::string> ids;
    for (const auto& [name, dimension] : kDimensions) {
      for (size_t line = 0; line < LinesOf(kCube, dimension).size(); ++line) {
        const auto id = generation.Get(std::string(name) + "/" + std::to_string(line) + "/nccl/0",
                                       absl::ZeroDuration());
        EXPECT_TRUE(id.ok()) << id.status();
        ids.push_back(id.value_or(""));
      }
    }
    return ids;
  }

  MemoryRendezvous generation;

 private:
  const std::unique_ptr<Device> device_;
  std::vector<Lines> lines_;
};

// Gathers the ranks' numbers over a line.
std::vector<float> Gathered(Communicator& line, int number) {
  std::vector<float> all(static_cast<size_t>(line.size()), -1);
  all[static_cast<size_t>(line.rank())] = static_cast<float>(number);
  const absl::Status status = line.AllGather(all.data(), 1, DType::kF32, Info()).Wait();
  EXPECT_TRUE(status.ok()) << status;
  return all;
}

TEST(NcclLines, OfACubeHaveAnIdEachInEachGenerationAndNoneCrosses) {
  FakeNccl nccl;
  {
    Cube first(&nccl), second(&nccl);
    std::set<std::string> ids;
    for (Cube* generation : {&first, &second}) {
      const std::vector<std::string> of_lines = generation->Ids();
      EXPECT_EQ(of_lines.size(), 12u);
      ids.insert(of_lines.begin(), of_lines.end());
      EXPECT_EQ(generation->generation.Keys().size(), 24u) << "two ranks a line";
    }
    EXPECT_EQ(ids.size(), 24u);

    // Both generations at once, all dimensions in one order.
    Cube::Each([&](int rank) {
      for (Cube* generation : {&first, &second}) {
        const int salt = generation == &second ? 100 : 0;
        for (const auto& [name, dimension] : kDimensions) {
          Communicator& line = *(*generation)[rank][name];
          std::vector<float> wanted;
          for (const int peer : LineOf(kCube, dimension, rank))
            wanted.push_back(static_cast<float>(salt + peer));
          EXPECT_EQ(Gathered(line, salt + rank), wanted) << name << " of rank " << rank;
          int sent = 1000 * (salt + rank), got = -1;
          const absl::Status status =
              line.Exchange({{.send = true, .buffer = &sent, .bytes = 4, .peer = 1 - line.rank()},
                             {.buffer = &got, .bytes = 4, .peer = 1 - line.rank()}},
                            Info())
                  .Wait();
          EXPECT_TRUE(status.ok()) << status;
          const int peer = LineOf(kCube, dimension, rank)[static_cast<size_t>(1 - line.rank())];
          EXPECT_EQ(got, 1000 * (salt + peer)) << name << " of rank " << rank;
        }
      }
    });
  }
  EXPECT_THAT(nccl.violations(), ::testing::IsEmpty());
}

// As a rank's program does: it enqueues on one line after the other and waits for nothing between.
// Where lines launched as their threads came, ranks would hold the GPU for kernels whose peers have
// no room for theirs.
TEST(NcclLines, LaunchAsTheProgramOrdersThemSoThatNoTwoKernelsNeedRoomAtOnce) {
  FakeNccl nccl;
  nccl.NoRoomForTwoKernels();
  {
    Cube cube(&nccl);
    Cube::Each([&](int rank) {
      constexpr size_t kRounds = 40;
      std::vector<std::vector<float>> data;
      data.reserve(kRounds * 3);
      std::vector<Event> events;
      for (size_t round = 0; round < kRounds; ++round) {
        for (const auto& [name, dimension] : kDimensions) {
          Communicator& line = *cube[rank][name];
          data.emplace_back(2, -1.0f)[static_cast<size_t>(line.rank())] =
              static_cast<float>(rank + 8 * static_cast<int>(round));
          events.push_back(line.AllGather(data.back().data(), 1, DType::kF32, Info()));
        }
      }
      for (size_t i = 0; i < events.size(); ++i) {
        ASSERT_TRUE(events[i].Wait().ok()) << events[i].Wait();
        const std::vector<int> ranks = LineOf(kCube, kDimensions[i % 3].second, rank);
        const float round = static_cast<float>(8 * (i / 3));
        ASSERT_THAT(data[i], ::testing::ElementsAre(static_cast<float>(ranks[0]) + round,
                                                    static_cast<float>(ranks[1]) + round));
      }
    });
  }
  EXPECT_THAT(nccl.violations(), ::testing::IsEmpty());
}

// The agent aborts every line of its rank, whichever of them waits.
TEST(NcclLines, AnAbortEndsAllLinesOfARankAndTheLinesWithoutItGoOn) {
  FakeNccl nccl;
  constexpr int kGone = 3;
  {
    Cube cube(&nccl);
    std::vector<std::vector<float>> data(3, std::vector<float>(2, 5.0f));
    std::vector<Event> pending;
    for (size_t i = 0; i < 3; ++i)
      pending.push_back(
          cube[kGone][kDimensions[i].first]->AllGather(data[i].data(), 1, DType::kF32, Info()));
    nccl.AwaitKernels(3);  // all three are on the GPU, and wait for peers that do not come
    for (auto& [name, line] : cube[kGone]) line->Abort("generation 8 begins");
    for (const Event& event : pending) {
      EXPECT_EQ(event.Wait().code(), absl::StatusCode::kAborted) << event.Wait();
      EXPECT_THAT(Text(event.Wait()), ::testing::HasSubstr("generation 8 begins"));
    }
    for (auto& [name, line] : cube[kGone])
      EXPECT_EQ(line->Barrier(Info()).Wait().code(), absl::StatusCode::kAborted) << name;
    EXPECT_EQ(nccl.aborted(), 3);
    for (const std::vector<float>& each : data) EXPECT_THAT(each, ::testing::Each(5.0f));

    Cube::Each([&](int rank) {
      for (const auto& [name, dimension] : kDimensions) {
        const std::vector<int> ranks = LineOf(kCube, dimension, rank);
        if (std::ranges::find(ranks, kGone) != ranks.end()) continue;
        EXPECT_EQ(Gathered(*cube[rank][name], rank),
                  std::vector<float>(ranks.begin(), ranks.end()));
      }
    });
  }
  EXPECT_THAT(nccl.violations(), ::testing::IsEmpty());
}

}  // namespace
}  // namespace zeroshard
