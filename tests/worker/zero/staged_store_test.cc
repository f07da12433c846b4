#include "worker/zero/staged_store.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/device/guarded_device.h"
#include "worker/device/host_event.h"
#include "worker/device/host_stream.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kLength = 1000;  // elements of a unit
constexpr size_t kUnbounded = size_t{1} << 40;

// Keeps what is pushed, as bf16, and gives it back for the step it was pushed for.
class KeepingStore : public StateStore {
 public:
  v1::StateVersion base() const override {
    v1::StateVersion version;
    version.set_step(41);
    return version;
  }
  Event Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
             const Event& after) override {
    if (hasty != nullptr) return DoneEvent(*hasty);
    if (begin > end) return DoneEvent(absl::InvalidArgumentError("begin beyond end"));
    return pushes_->Enqueue([=, this]() -> absl::Status {
      if (absl::Status status = after.Wait(); !status.ok()) return status;
      std::lock_guard lock(mutex_);
      auto& values = kept_[{step, unit}];
      values.resize(kLength);
      std::memcpy(values.data() + begin, data, static_cast<size_t>(end - begin) * 2);
      counters_.pushed += static_cast<uint64_t>(end - begin) * 2;
      return absl::OkStatus();
    });
  }
  Event Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out,
             const Event& after) override {
    if (begin > end) return DoneEvent(absl::InvalidArgumentError("begin beyond end"));
    return pulls_->Enqueue([=, this]() -> absl::Status {
      if (absl::Status status = after.Wait(); !status.ok()) return status;
      std::lock_guard lock(mutex_);
      const auto it = kept_.find({step, unit});
      if (it == kept_.end()) return absl::UnavailableError("never pushed");
      std::memcpy(out, it->second.data() + begin, static_cast<size_t>(end - begin) * 2);
      return absl::OkStatus();
    });
  }
  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t next_sample,
                                          uint64_t samples) override {
    v1::StepDecision decision;
    decision.set_step(record.step() + next_sample + samples);
    return decision;
  }
  void Abort(const std::string& reason) override { aborted = reason; }
  const OffloadCounters& counters() const override { return counters_; }

  std::unique_ptr<absl::Status> hasty;  // of pushes, whatever they should start after
  std::string aborted;

 private:
  std::mutex mutex_;
  std::map<std::pair<uint64_t, int>, std::vector<uint16_t>> kept_;
  OffloadCounters counters_;
  std::unique_ptr<HostStream> pushes_ = MakeHostStream("pushes");
  std::unique_ptr<HostStream> pulls_ = MakeHostStream("pulls");
};

class StagedStoreTest : public testing::TestWithParam<uint64_t> {
 protected:
  std::unique_ptr<StateStore> Make(size_t host_bytes) {
    auto inner = std::make_unique<KeepingStore>();
    inner_ = inner.get();
    return MakeStagedStore(std::move(inner), &device_, DType::kBF16, host_bytes);
  }
  Buffer Allocate() {
    absl::StatusOr<Buffer> buffer = device_.Allocate(2 * kLength, MemoryKind::kGradients);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return *std::move(buffer);
  }
  static std::vector<uint16_t> Values(int unit) {
    std::vector<uint16_t> values(kLength);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<uint16_t>(i * 31 + static_cast<size_t>(unit) * 7 + 1);
    }
    return values;
  }
  std::vector<uint16_t> Read(const Buffer& buffer, const Event& after = {}) {
    std::vector<uint16_t> values(kLength);
    const absl::Status status =
        device_.NewStream("read")->Copy(values.data(), buffer.data(), 2 * kLength, after).Wait();
    EXPECT_TRUE(status.ok()) << status;
    return values;
  }

  GuardedDevice device_{GetParam()};
  KeepingStore* inner_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Seeds, StagedStoreTest, testing::Range<uint64_t>(0, 3));

TEST_P(StagedStoreTest, WhatIsPushedComesBackWhateverHostMemoryThereIs) {
  for (const size_t host_bytes : {size_t{0}, size_t{2 * kLength}, size_t{5000}, kUnbounded}) {
    const auto store = Make(host_bytes);
    std::vector<std::vector<uint16_t>> values;
    std::vector<Buffer> pushed, pulled;
    std::vector<Event> pushes, pulls;
    for (int unit = 0; unit < 6; ++unit) values.push_back(Values(unit));
    for (int unit = 0; unit < 6; ++unit) {
      pushed.push_back(Allocate());
      char* const data = pushed.back().as<char>();
      const Event filled =
          device_.compute()->Copy(data, values[static_cast<size_t>(unit)].data(), 2 * kLength);
      pushes.push_back(store->Push(42, unit, 0, 300, data, filled));
      pushes.push_back(store->Push(42, unit, 300, kLength, data + 600, filled));
    }
    for (const Event& push : pushes) ASSERT_TRUE(push.Wait().ok()) << push.Wait();
    EXPECT_EQ(store->counters().pushed, 12000u);
    for (int unit = 0; unit < 6; ++unit) {
      pulled.push_back(Allocate());
      pulls.push_back(store->Pull(42, unit, 0, kLength, pulled.back().data(), {}));
    }
    for (size_t unit = 0; unit < 6; ++unit) {
      EXPECT_EQ(Read(pulled[unit], pulls[unit]), values[unit]) << unit << ", " << host_bytes;
    }
    EXPECT_EQ(inner_->aborted, "");
  }
}

TEST_P(StagedStoreTest, ACallAfterWorkThatFailedHasItsErrorAndTouchesNothing) {
  const auto store = Make(kUnbounded);
  const std::vector<uint16_t> values = Values(3);
  const Buffer buffer = Allocate();
  ASSERT_TRUE(CopyAndWait(&device_, buffer.data(), values.data(), 2 * kLength).ok());
  ASSERT_TRUE(store->Push(42, 0, 0, kLength, buffer.data(), {}).Wait().ok());
  const Event failed = DoneEvent(absl::DataLossError("rank 3 is not a number"));
  const Buffer out = Allocate();
  EXPECT_EQ(store->Pull(42, 0, 0, kLength, out.data(), failed).Wait(), failed.Wait());
  EXPECT_EQ(Read(out), std::vector<uint16_t>(kLength));
  EXPECT_EQ(store->Push(43, 0, 0, kLength, buffer.data(), failed).Wait(), failed.Wait());
  EXPECT_EQ(store->counters().pushed, 2000u);
  EXPECT_EQ(store->Push(43, 0, 5, 5, buffer.data(), failed).Wait(), failed.Wait());
  EXPECT_THAT(inner_->aborted, HasSubstr("rank 3 is not a number")) << "of no further use";
}

TEST_P(StagedStoreTest, APullTouchesNothingBeforeItsEvent) {
  const auto store = Make(kUnbounded);
  const std::vector<uint16_t> values = Values(5), old(kLength, 0x4242);
  const Buffer buffer = Allocate();
  ASSERT_TRUE(CopyAndWait(&device_, buffer.data(), values.data(), 2 * kLength).ok());
  ASSERT_TRUE(store->Push(42, 0, 0, kLength, buffer.data(), {}).Wait().ok());
  ASSERT_TRUE(CopyAndWait(&device_, buffer.data(), old.data(), 2 * kLength).ok());
  auto before = std::make_shared<HostEvent>();
  const Event pulled = store->Pull(42, 0, 0, kLength, buffer.data(), Event(before));
  EXPECT_FALSE(pulled.Done());
  EXPECT_EQ(Read(buffer), old);
  before->Finish(absl::OkStatus());
  EXPECT_EQ(Read(buffer, pulled), values);
}

TEST_P(StagedStoreTest, ACallThatFailsEarlyIsNotDoneBeforeItsCopyIs) {
  const auto store = Make(kUnbounded);
  inner_->hasty = std::make_unique<absl::Status>(absl::AbortedError("generation 4 has begun"));
  const Buffer buffer = Allocate();
  auto before = std::make_shared<HostEvent>();
  const Event event = store->Push(42, 0, 0, kLength, buffer.data(), Event(before));
  EXPECT_FALSE(event.Done());
  before->Finish(absl::OkStatus());
  EXPECT_EQ(event.Wait(), *inner_->hasty);
}

TEST_P(StagedStoreTest, ErrorsOfTheStoreArriveAndTheRestIsPassedOn) {
  const auto store = Make(kUnbounded);
  const Buffer buffer = Allocate();
  EXPECT_EQ(store->Pull(42, 0, 0, kLength, buffer.data(), {}).Wait(),
            absl::UnavailableError("never pushed"));
  EXPECT_EQ(Read(buffer), std::vector<uint16_t>(kLength));
  EXPECT_EQ(store->Pull(42, 0, 7, 5, buffer.data(), {}).Wait().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(store->base().step(), 41u);
  v1::StepRecord record;
  record.set_step(100);
  const auto decision = store->Commit(record, 20, 3);
  ASSERT_TRUE(decision.ok());
  EXPECT_EQ(decision->step(), 123u);
  store->Abort("rank 1 is gone");
  EXPECT_EQ(inner_->aborted, "rank 1 is gone");
}

// Units of 1000 and 64 elements on three ranks: shards of 384 (ceil(1000 / 3) in whole blocks of
// 64) and of 64, of which only rank 0 has any.
TEST(StagedBytes, AreWhatTheJobAllowsAndNeverMoreThanTheRankOwns) {
  ModelTable model;
  model.units.resize(2);
  model.units[0].length = 1000;
  model.units[1].length = 64;
  constexpr int64_t kAny = int64_t{1} << 62;
  EXPECT_EQ(StagedBytes(model, 3, 0, DType::kBF16, kAny, kAny), 2u * (448 + 448));
  EXPECT_EQ(StagedBytes(model, 3, 1, DType::kBF16, kAny, kAny), 2u * (384 + 384));
  EXPECT_EQ(StagedBytes(model, 3, 2, DType::kF32, kAny, kAny), 4u * (232 + 232));
  EXPECT_EQ(StagedBytes(model, 1, 0, DType::kF32, kAny, kAny), 4u * (1064 + 1064));
  EXPECT_EQ(StagedBytes(model, 3, 0, DType::kBF16, 100, kAny), 2u * (100 + 448));
  EXPECT_EQ(StagedBytes(model, 3, 0, DType::kBF16, 100, 50), 2u * (100 + 50));
}

}  // namespace
}  // namespace zeroshard
