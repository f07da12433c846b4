// Four ranks as a mesh of two by two whose lines are communicators, whatever makes them.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/line_communicator.h"
#include "worker/comm/memory_rendezvous.h"

namespace zeroshard {

constexpr int kMeshRanks = 4;

// Of rank 2 d + t.
inline MeshLine TensorLine(int rank) {
  const int first = rank - rank % 2;
  return {"tensor", rank / 2, {first, first + 1}};
}
inline MeshLine DataLine(int rank) { return {"data", rank % 2, {rank % 2, rank % 2 + 2}}; }

inline CommunicatorOptions MeshOptions(int rank) {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = kMeshRanks;
  options.host = "127.0.0.1";
  options.connect_timeout = options.operation_timeout = absl::Seconds(20);
  return options;
}

// A rank's two communicators, or why there are none.
struct RankLines {
  absl::StatusOr<std::unique_ptr<Communicator>> tensor, data;
};

inline std::vector<RankLines> MakeMeshLines(MemoryRendezvous* rendezvous, Device* device,
                                            const CommunicatorMaker& make) {
  std::vector<RankLines> lines(kMeshRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kMeshRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const CommunicatorOptions job = MeshOptions(rank);
      lines[rank].tensor = MakeLineCommunicator(TensorLine(rank), job, rendezvous, device, make);
      lines[rank].data = MakeLineCommunicator(DataLine(rank), job, rendezvous, device, make);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return lines;
}

// The number of each rank of a line reaches the others of the line, and nobody else.
inline void ExpectGathers(const std::vector<RankLines>& lines) {
  const auto gather = [](Communicator& line, int number) {
    std::vector<float> all(static_cast<size_t>(line.size()), -1);
    all[static_cast<size_t>(line.rank())] = static_cast<float>(number);
    const absl::Status status =
        line.AllGather(all.data(), 1, DType::kF32, {.unit = "blocks.0"}).Wait();
    EXPECT_TRUE(status.ok()) << status;
    return all;
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kMeshRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const float first = static_cast<float>(rank - rank % 2);
      EXPECT_THAT(gather(**lines[rank].tensor, rank), ::testing::ElementsAre(first, first + 1));
      const float column = static_cast<float>(rank % 2);
      EXPECT_THAT(gather(**lines[rank].data, rank), ::testing::ElementsAre(column, column + 2));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace zeroshard
