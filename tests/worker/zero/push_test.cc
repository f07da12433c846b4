#include "worker/zero/push.h"

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/worker/zero/held_store.h"
#include "worker/device/host_stream.h"

namespace zeroshard {
namespace {

class GradientPusherTest : public testing::Test {
 protected:
  static constexpr int64_t kPiece = 64;
  static constexpr int64_t kPieces = 5;

  // One unit, all of it this rank's, with `type` gradients that travel as bf16.
  void Make(DType type) {
    ops_ = MakeCpuOps(1);
    policy_.options.dtype = DType::kBF16;
    policy_.options.push_buffers = 2;
    policy_.options.push_buffer_size = kPiece;
    UnitState& unit = units_.emplace_back();
    unit.own_end = kPieces * kPiece;
    unit.dtype = DType::kBF16;
    unit.gradient_type = type;
    unit.gradient = *device_->Allocate(static_cast<size_t>(unit.own_end) * SizeOf(type),
                                       MemoryKind::kGradients);
    pusher_ =
        std::make_unique<GradientPusher>(&policy_, &units_, &store_, device_.get(), ops_.get());
    pusher_->BeginStep(7);
  }
  float* gradient() { return units_[0].gradient.as<float>(); }
  ElementRange all() const { return {0, kPieces * kPiece}; }
  // Advance until so many pieces have left: the store's thread takes its time.
  bool AdvanceTo(size_t pieces) {
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (store_.pushed.size() < pieces && absl::Now() < deadline) {
      if (!pusher_->Advance().ok()) return false;
      std::this_thread::yield();
    }
    return store_.pushed.size() == pieces;
  }

  std::unique_ptr<Device> device_ = MakeCpuDevice();
  std::unique_ptr<Ops> ops_;
  ZeroPolicy policy_;
  std::vector<UnitState> units_;
  HeldStore store_;
  std::unique_ptr<GradientPusher> pusher_;
};

TEST_F(GradientPusherTest, WhatIsInTheWireTypeLeavesFromWhereItLies) {
  Make(DType::kBF16);
  pusher_->Push(0, {kPiece, 3 * kPiece}, {});
  ASSERT_EQ(store_.pushed.size(), 1u);
  EXPECT_EQ(store_.pushed[0].step, 7u);
  EXPECT_EQ(store_.pushed[0].begin, kPiece);
  EXPECT_EQ(store_.pushed[0].end, 3 * kPiece);
  EXPECT_EQ(store_.pushed[0].data, units_[0].gradient.as<char>() + 2 * kPiece);
  EXPECT_EQ(device_->memory().PeakBytes(MemoryKind::kBuffers), 0);
  pusher_->Push(0, {0, 0}, {});
  EXPECT_EQ(store_.pushed.size(), 1u) << "nothing is nothing";
  store_.Acknowledge(1);
  EXPECT_TRUE(pusher_->Drain().ok());
}

TEST_F(GradientPusherTest, RoundsOnceInPlaceInNoMoreBuffersThanThereAre) {
  Make(DType::kF32);
  // bf16 has 8 bits of precision: 1 + 2^-8 is a tie that goes to even, 1 + 2^-8 + 2^-12 goes up.
  for (int64_t i = 0; i < all().end; ++i)
    gradient()[i] = i % 2 == 0 ? 1.00390625f : 1.004150390625f;
  pusher_->Push(0, all(), {});
  EXPECT_TRUE(store_.pushed.empty()) << "rounding waits to be asked for";
  ASSERT_TRUE(pusher_->Advance().ok());
  EXPECT_EQ(store_.pushed.size(), 2u) << "there are two buffers, and none is acknowledged";
  EXPECT_EQ(gradient()[0], 1.0f);
  EXPECT_EQ(gradient()[1], 1.0078125f);
  EXPECT_EQ(gradient()[2 * kPiece], 1.00390625f) << "not rounded yet";
  store_.Acknowledge(1);
  EXPECT_TRUE(AdvanceTo(3));
  store_.Acknowledge(1000);
  ASSERT_TRUE(pusher_->FinishRounding().ok());
  ASSERT_EQ(store_.pushed.size(), static_cast<size_t>(kPieces));
  for (int64_t i = 0; i < kPieces; ++i) {
    EXPECT_EQ(store_.pushed[static_cast<size_t>(i)].begin, i * kPiece);
    EXPECT_EQ(store_.pushed[static_cast<size_t>(i)].end, (i + 1) * kPiece);
  }
  for (int64_t i = 0; i < all().end; ++i)
    ASSERT_EQ(gradient()[i], i % 2 == 0 ? 1.0f : 1.0078125f) << i;
  EXPECT_TRUE(pusher_->Drain().ok());
  EXPECT_LE(device_->memory().PeakBytes(MemoryKind::kBuffers), 2 * kPiece * 2);
}

TEST_F(GradientPusherTest, NothingIsRoundedBeforeItsSumIsThere) {
  Make(DType::kF32);
  std::mutex mutex;
  std::unique_ptr<HostStream> sums = MakeHostStream("sums");
  Event sum;
  {
    std::lock_guard<std::mutex> lock(mutex);
    sum = sums->Enqueue([&] {
      std::lock_guard<std::mutex> until_released(mutex);
      gradient()[0] = 3.0f;
      return absl::OkStatus();
    });
    pusher_->Push(0, {0, kPiece}, sum);
    ASSERT_TRUE(pusher_->Advance().ok());
    EXPECT_TRUE(store_.pushed.empty());
  }
  ASSERT_TRUE(pusher_->FinishRounding().ok());
  ASSERT_EQ(store_.pushed.size(), 1u);
  float sent = 0;
  ops_->Convert(store_.pushed[0].data, DType::kBF16, 1, &sent, DType::kF32);
  EXPECT_EQ(sent, 3.0f);
  store_.Acknowledge(1);
  EXPECT_TRUE(pusher_->Drain().ok());
}

TEST_F(GradientPusherTest, TheErrorOfAStoreOrOfASumIsTheDrains) {
  Make(DType::kBF16);
  pusher_->Push(0, {0, kPiece}, {});
  store_.Acknowledge(1, absl::UnavailableError("store-1 is gone"));
  EXPECT_EQ(pusher_->Drain(), absl::UnavailableError("store-1 is gone"));
  units_[0].gradient_type = DType::kF32;
  std::unique_ptr<HostStream> sums = MakeHostStream("sums");
  pusher_->Push(0, {0, kPiece}, sums->Enqueue([] { return absl::AbortedError("no sum"); }));
  EXPECT_EQ(pusher_->FinishRounding(), absl::AbortedError("no sum"));
  EXPECT_EQ(store_.pushed.size(), 1u);
}

}  // namespace
}  // namespace zeroshard
