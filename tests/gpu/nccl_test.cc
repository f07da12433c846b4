// The real NCCL through the table that the communicator uses: what one rank can show of it. (The
// communicator itself connects to nobody where it is alone.)
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/gpu/gpu_fixture.h"
#include "worker/comm/memory_rendezvous.h"
#include "worker/comm/nccl/cuda/cuda_nccl_api.h"
#include "worker/comm/nccl/nccl_connect.h"
#include "worker/comm/nccl/nccl_end.h"

namespace zeroshard {
namespace {

constexpr int64_t kCount = 70001;
constexpr absl::Duration kPatience = absl::Seconds(30);

bool Await(const std::function<bool()>& holds) {
  const absl::Time deadline = absl::Now() + kPatience;
  while (!holds()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

class GpuNccl : public GpuFixture {
 protected:
  void SetUp() override {
    GpuFixture::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto api = MakeCudaNcclApi(cuda::AsCudaDevice(device_.get()));
    ASSERT_TRUE(api.ok()) << api.status();
    api_ = *std::move(api);
    api_->EnterThread();
    auto stream = api_->NewStream();
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *stream;
    CommunicatorOptions options;
    options.rank = 0;
    options.size = 1;
    options.connect_timeout = kPatience;
    ending_.exit_process = [this](const std::string&) { exited_ = true; };
    MemoryRendezvous rendezvous;
    auto comm = ConnectNccl(api_.get(), options, ending_, &rendezvous);
    ASSERT_TRUE(comm.ok()) << comm.status();
    comm_ = *comm;
  }
  void TearDown() override {
    if (stream_ != nullptr) api_->DeleteStream(stream_);
    api_.reset();
    GpuFixture::TearDown();
  }

  // What a call has started on the host is done, as it should be.
  void Settles(NcclResult called) {
    ASSERT_TRUE(called == NcclResult::kSuccess || called == NcclResult::kInProgress)
        << api_->Describe(called, comm_);
    NcclResult state = NcclResult::kInProgress;
    ASSERT_TRUE(Await([&] {
      const NcclResult asked = api_->AsyncError(comm_, &state);
      return asked != NcclResult::kSuccess || state != NcclResult::kInProgress;
    }));
    ASSERT_EQ(state, NcclResult::kSuccess) << api_->Describe(state, comm_);
  }
  // The stream has done all that was put on it.
  void Reaches() {
    auto mark = api_->Mark(stream_);
    ASSERT_TRUE(mark.ok()) << mark.status();
    EXPECT_TRUE(Await([&] {
      auto reached = api_->Reached(*mark);
      EXPECT_TRUE(reached.ok()) << reached.status();
      return !reached.ok() || *reached;
    }));
    api_->FreeMark(*mark);
  }
  std::vector<char> Bytes(uint8_t first) const {
    std::vector<uint8_t> bytes(kCount * sizeof(float));
    std::iota(bytes.begin(), bytes.end(), first);
    // No NaN and no infinity of any type: the exponent's top bit is never set.
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] &= 0xBF;
    return {bytes.begin(), bytes.end()};
  }
  Buffer Empty() { return Upload(std::vector<char>(kCount * sizeof(float), '\xFF')); }

  std::shared_ptr<NcclApi> api_;
  NcclStream* stream_ = nullptr;
  NcclComm* comm_ = nullptr;
  NcclEnding ending_;
  std::atomic<bool> exited_{false};
};

TEST_F(GpuNccl, CopiesWhatOneRankGivesItself) {
  const std::vector<char> gathered = Bytes(1), scattered = Bytes(2), reduced = Bytes(3),
                          sent = Bytes(4);
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16, DType::kU8}) {
    const auto count = static_cast<int64_t>(gathered.size() / SizeOf(type));
    const Buffer from[] = {Upload(gathered), Upload(scattered), Upload(reduced), Upload(sent)};
    const Buffer to[] = {Empty(), Empty(), Empty(), Empty()};
    const auto call = [&](NcclResult result) {
      EXPECT_TRUE(result == NcclResult::kSuccess || result == NcclResult::kInProgress)
          << api_->Describe(result, comm_);
    };
    call(api_->GroupStart());
    call(api_->AllGather(from[0].data(), to[0].data(), count, type, comm_, stream_));
    call(api_->ReduceScatter(from[1].data(), to[1].data(), count, type, comm_, stream_));
    call(api_->AllReduce(from[2].data(), to[2].data(), count, type, comm_, stream_));
    Settles(api_->GroupEnd());
    call(api_->GroupStart());
    call(api_->Send(from[3].data(), count, type, 0, comm_, stream_));
    call(api_->Receive(to[3].data(), count, type, 0, comm_, stream_));
    Settles(api_->GroupEnd());
    call(api_->GroupStart());
    call(api_->Broadcast(from[0].data(), count, type, 0, comm_, stream_));
    Settles(api_->GroupEnd());
    Reaches();
    EXPECT_EQ(Download(to[0]), gathered) << NameOf(type);
    EXPECT_EQ(Download(to[1]), scattered) << NameOf(type);
    EXPECT_EQ(Download(to[2]), reduced) << NameOf(type);
    EXPECT_EQ(Download(to[3]), sent) << NameOf(type);
    EXPECT_EQ(Download(from[0]), gathered) << NameOf(type);
  }
  Settles(api_->Finalize(comm_));
  EXPECT_EQ(api_->Destroy(comm_), NcclResult::kSuccess);
}

// Refusing is allowed, and then the memory is used all the same.
TEST_F(GpuNccl, UsesMemoryThatItWasShownBefore) {
  const std::vector<char> bytes = Bytes(5);
  const Buffer memory = Upload(bytes);
  void* handle = nullptr;
  const NcclResult shown = api_->Register(comm_, memory.data(), memory.bytes(), &handle);
  const bool registered = shown == NcclResult::kSuccess || shown == NcclResult::kInProgress;
  RecordProperty("registered", registered ? "yes" : api_->Describe(shown, comm_));
  if (registered) Settles(shown);
  api_->GroupStart();
  api_->AllReduce(memory.data(), memory.data(), kCount, DType::kF32, comm_, stream_);
  Settles(api_->GroupEnd());
  Reaches();
  EXPECT_EQ(Download(memory), bytes);
  if (registered && handle != nullptr) Settles(api_->Deregister(comm_, handle));
  Settles(api_->Finalize(comm_));
  EXPECT_EQ(api_->Destroy(comm_), NcclResult::kSuccess);
}

TEST_F(GpuNccl, IsAbortedInTheMiddleOfWork) {
  const Buffer memory = Upload(Bytes(6));
  for (int i = 0; i < 50; ++i) {
    api_->GroupStart();
    api_->AllReduce(memory.data(), memory.data(), kCount, DType::kF32, comm_, stream_);
    Settles(api_->GroupEnd());
  }
  EXPECT_TRUE(AbortComm(api_.get(), comm_, ending_, "rank 0 of 1", "a test"));
  EXPECT_FALSE(exited_);
  Reaches();  // the stream is free, and the device of use
  EXPECT_EQ(Download(memory), Bytes(6));
}

}  // namespace
}  // namespace zeroshard
