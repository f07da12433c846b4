// Gradients of an offloaded job that leave from where they were reduced, on one rank.
#include "worker/zero/reduce.h"

#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/device/guarded_device.h"
#include "tests/worker/device/guarded_ops.h"
#include "tests/worker/zero/held_store.h"
#include "worker/comm/gloo_communicator.h"
#include "worker/comm/staged_communicator.h"
#include "worker/zero/staged_store.h"
#include "worker/zero/token_rows.h"

namespace zeroshard {
namespace {

constexpr int kLayers = 6;
constexpr int kRoom = 3;  // buffers, as worker/zero/reduce.cc has it

v1::ModelSpec Model() {
  v1::ModelSpec model;
  model.set_architecture("gpt2");
  model.set_hidden_size(32);
  model.set_layers(kLayers);
  model.set_heads(2);
  model.set_sequence_length(8);
  model.set_vocab_size(61);
  return model;
}

constexpr int kCpu = -1;

// On the CPU, or on a guarded device of this seed.
class LeavingGradients : public testing::TestWithParam<int>, public WaitObserver {
 protected:
  void SetUp() override {
    MakeDevice();
    ZeroOptions options;
    options.stage = 3;
    options.dtype = DType::kF32;
    options.offload_optimizer = true;
    options.reduce_bucket = 4096;  // a block leaves in several parts
    policy_ = MakeZeroPolicy(model_, options);
    CommunicatorOptions gloo;
    gloo.host = "127.0.0.1";
    comm_ = *MakeGlooCommunicator(gloo, nullptr, device_.get());
    std::unique_ptr<StateStore> store = std::make_unique<HeldStore>(DType::kF32);
    store_ = static_cast<HeldStore*>(store.get());
    if (GetParam() != kCpu) {
      comm_ = MakeStagedCommunicator(std::move(comm_), device_.get());
      store = MakeStagedStore(std::move(store), device_.get(), DType::kF32,
                              std::numeric_limits<size_t>::max());
    }
    any_store_ = std::move(store);
    units_ = *MakeUnitStates(model_, policy_, 0, device_.get());
    squares_ = *GradientSquares::Create(units_.size(), device_.get(), ops_.get());
    pusher_ = std::make_unique<GradientPusher>(&policy_, &units_, any_store_.get(), device_.get(),
                                               ops_.get());
    reducer_ = std::make_unique<GradientReducer>(&policy_, &units_, comm_.get(), device_.get(),
                                                 ops_.get(), pusher_.get(), squares_.get());
    reducer_->SetWaitObserver(this);
    squares_->Begin();
    pusher_->BeginStep(1);
    reducer_->BeginRound(1, 0, 1);
  }
  void TearDown() override {
    store_->Acknowledge(1000);
    reducer_.reset();
    pusher_.reset();
  }

  void MakeDevice() {
    if (GetParam() == kCpu) {
      device_ = MakeCpuDevice();
      ops_ = MakeCpuOps(1);
      return;
    }
    auto device = std::make_unique<GuardedDevice>(static_cast<uint64_t>(GetParam()));
    ops_ = std::make_unique<GuardedOps>(device.get());
    device_ = std::move(device);
  }

  // The stores take what the oldest buffer holds when somebody waits for room, and not before.
  void BeginWait(WaitKind kind) override {
    EXPECT_FALSE(waiting_) << "waits do not nest";
    waiting_ = true;
    if (kind == WaitKind::kRanks) {
      ++waits_for_ranks_;
      return;
    }
    EXPECT_EQ(waits_for_ranks_, 0) << "room is there before the ranks are";
    ++waits_;
    store_->Acknowledge(parts_, error_);
  }
  void EndWait() override { waiting_ = false; }

  // Different in each unit and element.
  static std::vector<float> Gradient(int unit, int64_t length) {
    std::vector<float> values(static_cast<size_t>(length));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(unit) + static_cast<float>(i) * 0x1p-16f;
    return values;
  }
  int64_t Length(int unit) const { return model_.units[static_cast<size_t>(unit)].length; }

  // As a unit's backward does, from the last part to the first.
  void Backward(int unit) {
    const int64_t length = Length(unit);
    const auto memory = reducer_->Sink(unit)->Acquire(0, length);
    ASSERT_TRUE(memory.ok()) << memory.status();
    for (const HeldStore::Pushed& push : store_->pushed) {
      EXPECT_FALSE(push.unit == unit + kRoom && push.read.empty())
          << "unit " << unit << " has the buffer that unit " << push.unit << " leaves from";
    }
    const std::vector<float>& values = computed_.emplace_back(Gradient(unit, length));
    device_->compute()->Copy(*memory, values.data(), values.size() * sizeof(float));
    const int64_t middle = length / 128 * 64;
    ASSERT_TRUE(reducer_->Sink(unit)->Done(middle, length).ok());
    ASSERT_TRUE(reducer_->Sink(unit)->Done(0, middle).ok());
  }

  const ModelTable model_ = *MakeModelTable(Model());
  std::deque<std::vector<float>> computed_;  // what the device has yet to copy
  std::unique_ptr<Device> device_;
  std::unique_ptr<Ops> ops_;
  ZeroPolicy policy_;
  std::unique_ptr<Communicator> comm_;
  std::vector<UnitState> units_;
  std::unique_ptr<StateStore> any_store_;  // it, or what stages for it
  HeldStore* store_ = nullptr;
  std::unique_ptr<GradientSquares> squares_;
  std::unique_ptr<GradientPusher> pusher_;
  std::unique_ptr<GradientReducer> reducer_;
  const int parts_ = 2;  // of a block, as Backward hands it out
  int waits_ = 0;        // for stores
  int waits_for_ranks_ = 0;
  bool waiting_ = false;
  absl::Status error_;  // of what the store is then told to take
};

INSTANTIATE_TEST_SUITE_P(On, LeavingGradients, testing::Values(kCpu, 0, 1, 2, 3, 4, 5),
                         [](const auto& info) {
                           return info.param == kCpu ? std::string("Cpu")
                                                     : "Guarded" + std::to_string(info.param);
                         });

TEST_P(LeavingGradients, ABufferIsWrittenAgainOnlyWhenTheStoreHasReadIt) {
  for (int unit = kLayers; unit >= 1; --unit) Backward(unit);
  EXPECT_EQ(waits_for_ranks_, 0);
  EXPECT_EQ(waits_, kLayers - kRoom) << "each block after the third waits for the one before it";
  EXPECT_EQ(store_->pushed.size(), static_cast<size_t>(parts_ * kLayers));
  store_->Acknowledge(1000);
  ASSERT_TRUE(pusher_->Drain().ok());
  for (const HeldStore::Pushed& push : store_->pushed) {
    const std::vector<float> wanted = Gradient(push.unit, Length(push.unit));
    ASSERT_EQ(push.read.size(), static_cast<size_t>(push.end - push.begin) * sizeof(float));
    EXPECT_EQ(std::memcmp(push.read.data(), wanted.data() + push.begin, push.read.size()), 0)
        << "unit " << push.unit << " from element " << push.begin;
  }
}

TEST_P(LeavingGradients, RoomForTheTokensRowsIsAWaitForTheStores) {
  policy_.sparse_rows = false;
  ASSERT_TRUE(policy_.tied);
  const auto rows = TokenRows::Create(&model_, &policy_, &units_.front(), reducer_.get(),
                                      comm_.get(), device_.get(), ops_.get());
  ASSERT_TRUE(rows.ok()) << rows.status();
  (*rows)->SetWaitObserver(this);
  const int64_t tokens = policy_.row_slots;
  ops_->Zero((*rows)->ids(), static_cast<size_t>(tokens) * sizeof(int32_t));
  ops_->Zero((*rows)->rows(), static_cast<size_t>(tokens * model_.config.hidden) * sizeof(float));
  for (int unit = kLayers; unit > kLayers - kRoom; --unit) Backward(unit);
  EXPECT_EQ(waits_, 0);
  ASSERT_TRUE((*rows)->Reduce(1, 0, 1).ok());
  EXPECT_EQ(waits_, 1);
  EXPECT_EQ(waits_for_ranks_, 1);
  store_->Acknowledge(1000);
  ASSERT_TRUE(pusher_->Drain().ok());
  ASSERT_TRUE(reducer_->Drain().ok());
}

TEST_P(LeavingGradients, ThreeBlocksAreTheMostThatLiveAtOnceAndNothingIsKept) {
  const int64_t before = device_->memory().Bytes(MemoryKind::kBuffers);
  for (int unit = kLayers; unit >= 1; --unit) Backward(unit);
  EXPECT_EQ(device_->memory().PeakBytes(MemoryKind::kBuffers) - before,
            kRoom * Length(1) * static_cast<int64_t>(sizeof(float)));
  EXPECT_EQ(device_->memory().PeakBytes(MemoryKind::kGradients),
            Length(0) * static_cast<int64_t>(sizeof(float)))
      << "the embedding's";
}

// Some squares are taken when a buffer comes back, the others at the end; each in parts.
TEST_P(LeavingGradients, TheNormIsThatOfTheWholeGradient) {
  for (int unit = kLayers; unit >= 1; --unit) Backward(unit);
  ASSERT_TRUE(reducer_->FinishRounds().ok()) << "which waits for no store";
  ASSERT_TRUE(squares_->Read().Wait().ok());
  const std::unique_ptr<Ops> host = MakeCpuOps(1);
  for (int unit = 1; unit <= kLayers; ++unit) {
    const std::vector<float> values = Gradient(unit, Length(unit));
    NormAccumulator wanted;
    for (size_t i = 0; i < values.size(); i += 64)
      host->AddSquares(values.data() + i, 64, DType::kF32, &wanted);
    const NormAccumulator& seen = squares_->Of(static_cast<size_t>(unit));
    EXPECT_EQ(std::memcmp(&seen, &wanted, sizeof(wanted)), 0) << "unit " << unit;
  }
}

TEST_P(LeavingGradients, TheErrorOfAStoreIsThatOfTheNextWhoNeedsRoom) {
  for (int unit = kLayers; unit > kLayers - kRoom; --unit) Backward(unit);
  error_ = absl::UnavailableError("store-1 is gone");
  EXPECT_EQ(reducer_->Sink(1)->Acquire(0, Length(1)).status(), error_);
}

}  // namespace
}  // namespace zeroshard
