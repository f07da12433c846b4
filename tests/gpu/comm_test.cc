// Collectives over a GPU's memory: NCCL alone, and two ranks that share the GPU through Gloo and
// host memory. Expected values are small integers, exact in 16 bits too.
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/worker/ops/typed_values.h"
#include "worker/comm/memory_rendezvous.h"
#include "worker/comm/nccl/cuda/make_nccl_communicator.h"
#include "worker/comm/staged_communicator.h"

namespace zeroshard {
namespace {

constexpr int64_t kCount = 70001;  // odd, and beyond what is summed directly

std::vector<double> Whole(int64_t count, int salt) {
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<double>((i * 7 + salt) % 61) - 30);
  return values;
}

struct Part {
  Device* device;
  Communicator* comm;
};

// Memory of the device with these values in it.
Buffer Put(Device* device, const std::vector<double>& values, DType type) {
  TypedValues typed(static_cast<int64_t>(values.size()), type);
  for (size_t i = 0; i < values.size(); ++i)
    typed.Set(static_cast<int64_t>(i), static_cast<float>(values[i]));
  auto buffer = device->Allocate(values.size() * SizeOf(type), MemoryKind::kBuffers);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_TRUE(CopyAndWait(device, buffer->data(), typed.data(), buffer->bytes()).ok());
  return *std::move(buffer);
}

std::vector<double> Get(Device* device, const Buffer& buffer, DType type) {
  TypedValues typed(static_cast<int64_t>(buffer.bytes() / SizeOf(type)), type);
  EXPECT_TRUE(CopyAndWait(device, typed.data(), buffer.data(), buffer.bytes()).ok());
  return typed.AsDoubles();
}

CollectiveInfo Info() { return {Phase::kBackward, "blocks.1", 3}; }

void ExpectDone(const Event& event) {
  const absl::Status status = event.Wait();
  EXPECT_TRUE(status.ok()) << status;
}

// Rank r's gradients are Whole(n, r).
std::vector<double> SumOfRanks(int ranks, int64_t count) {
  std::vector<double> sum(static_cast<size_t>(count));
  for (int r = 0; r < ranks; ++r) {
    const std::vector<double> values = Whole(count, r);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
  }
  return sum;
}

void GatherIsEveryRanks(Part part, DType type) {
  const int rank = part.comm->rank(), size = part.comm->size();
  std::vector<double> wanted, mine(static_cast<size_t>(size * kCount), -1);
  for (int r = 0; r < size; ++r) {
    const std::vector<double> values = Whole(kCount, r);
    wanted.insert(wanted.end(), values.begin(), values.end());
    if (r == rank) std::copy(values.begin(), values.end(), mine.begin() + r * kCount);
  }
  const Buffer memory = Put(part.device, mine, type);
  ExpectDone(part.comm->AllGather(memory.data(), kCount, type, Info()));
  EXPECT_EQ(Get(part.device, memory, type), wanted);
}

void ReduceScatterIsTheSum(Part part, DType type, DType output_type, bool accumulate) {
  const int rank = part.comm->rank(), size = part.comm->size();
  ReduceScatterArgs args;
  args.type = type;
  int64_t first = 0, total = 0;
  for (int r = 0; r < size; ++r) {
    args.counts.push_back(20000 + 17 * r);
    if (r < rank) first += args.counts.back();
    total += args.counts.back();
  }
  args.contributors = size;
  const auto count = args.counts[static_cast<size_t>(rank)];
  const Buffer input = Put(part.device, Whole(total, rank), type);
  const Buffer output = Put(part.device, Whole(count, 40), output_type);
  args.input = input.data();
  args.output = output.data();
  args.output_type = output_type;
  args.accumulate = accumulate;
  ExpectDone(part.comm->ReduceScatter(args, Info()));
  const std::vector<double> sum = SumOfRanks(size, total), before = Whole(count, 40);
  std::vector<double> wanted(sum.begin() + first, sum.begin() + first + count);
  for (size_t i = 0; accumulate && i < wanted.size(); ++i) wanted[i] += before[i];
  EXPECT_EQ(Get(part.device, output, output_type), wanted);
}

void AllReduceIsTheSum(Part part, DType type, int64_t count) {
  const Buffer memory = Put(part.device, Whole(count, part.comm->rank()), type);
  ExpectDone(part.comm->AllReduce(memory.data(), count, type, Info()));
  EXPECT_EQ(Get(part.device, memory, type), SumOfRanks(part.comm->size(), count));
}

// Everything starts after copies that are still under way.
void OperationsAwaitTheirInput(Part part) {
  const std::vector<float> ones(kCount, 1.0f);
  const Buffer memory = Put(part.device, Whole(kCount, 0), DType::kF32);
  const Event filled = part.device->compute()->Copy(memory.data(), ones.data(), memory.bytes());
  ExpectDone(part.comm->AllReduce(memory.data(), kCount, DType::kF32, Info(), filled));
  EXPECT_THAT(Get(part.device, memory, DType::kF32),
              testing::Each(static_cast<double>(part.comm->size())));
}

void BytesReachTheOthers(Part part) {
  const int rank = part.comm->rank(), size = part.comm->size();
  const Buffer memory = Put(part.device, Whole(kCount, rank), DType::kF32);
  for (int root = 0; root < size; ++root) {
    ExpectDone(
        part.comm->Broadcast(memory.data(), static_cast<int64_t>(memory.bytes()), root, Info()));
    EXPECT_EQ(Get(part.device, memory, DType::kF32), Whole(kCount, 0));
  }
  if (size > 1) {
    const Buffer mine = Put(part.device, Whole(kCount, 50 + rank), DType::kF32);
    const auto bytes = static_cast<int64_t>(mine.bytes());
    if (rank == 0) ExpectDone(part.comm->Send(mine.data(), bytes, 1, Info()));
    if (rank == 1) {
      ExpectDone(part.comm->Recv(mine.data(), bytes, 0, Info()));
      EXPECT_EQ(Get(part.device, mine, DType::kF32), Whole(kCount, 50));
    }
  }
  std::vector<int64_t> said(static_cast<size_t>(size), -1);
  said[static_cast<size_t>(rank)] = 100 + rank;
  const absl::Status status = part.comm->AllGatherHost(said.data(), sizeof(int64_t), Info());
  EXPECT_TRUE(status.ok()) << status;
  for (int r = 0; r < size; ++r) EXPECT_EQ(said[static_cast<size_t>(r)], 100 + r);
  ExpectDone(part.comm->Barrier(Info()));
}

void EveryCollective(Part part) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    GatherIsEveryRanks(part, type);
    for (const bool accumulate : {false, true}) {
      ReduceScatterIsTheSum(part, type, DType::kF32, accumulate);
      ReduceScatterIsTheSum(part, type, type, accumulate);
    }
    for (const int64_t count : {int64_t{1}, int64_t{4096}, kCount})
      AllReduceIsTheSum(part, type, count);
  }
  OperationsAwaitTheirInput(part);
  BytesReachTheOthers(part);
}

class GpuCollectives : public GpuFixture {};

CommunicatorOptions OptionsOf(int rank, int size) {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size;
  options.host = "127.0.0.1";
  options.connect_timeout = options.operation_timeout = absl::Seconds(30);
  return options;
}

TEST_F(GpuCollectives, OfNcclWithOneRankAreExact) {
  for (const bool deterministic : {true, false}) {
    MemoryRendezvous rendezvous;
    CommunicatorOptions options = OptionsOf(0, 1);
    options.deterministic = deterministic;
    auto comm = MakeNcclCommunicator(options, &rendezvous, device_.get());
    ASSERT_TRUE(comm.ok()) << comm.status();
    EveryCollective({device_.get(), comm->get()});
  }
}

TEST_F(GpuCollectives, OfTwoRanksThatShareTheGpuAreExact) {
  constexpr int kRanks = 2;
  MemoryRendezvous rendezvous;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      auto device = MakeCudaDevice(0);
      ASSERT_TRUE(device.ok()) << device.status();
      auto gloo = MakeGlooCommunicator(OptionsOf(rank, kRanks), &rendezvous, device->get());
      ASSERT_TRUE(gloo.ok()) << gloo.status();
      const auto comm = MakeStagedCommunicator(*std::move(gloo), device->get());
      EveryCollective({device->get(), comm.get()});
      ExpectDone(comm->Barrier(Info()));  // nobody hangs up while another still reads
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace
}  // namespace zeroshard
