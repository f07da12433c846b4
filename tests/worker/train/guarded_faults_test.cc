// How jobs end on a device whose work is done later: with a reason, soon, and with nothing on its
// way to memory that is gone.
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/worker/train/guarded_backend.h"
#include "tests/worker/train/offload_harness.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

constexpr std::chrono::seconds kSoon(30);

// The kernel that fails does so on the device; the call that asked for it is OK.
enum class Kernel : uint8_t { kProduct, kUpdate };

class FailingOps : public GuardedOps {
 public:
  // The call-th one fails.
  FailingOps(GuardedDevice* device, Kernel kernel, int call)
      : GuardedOps(device), device_(*device), kernel_(kernel), call_(call) {}

  absl::Status Matmul(const MatmulArgs& args) override {
    Count(Kernel::kProduct);
    return GuardedOps::Matmul(args);
  }
  void AdamW(const AdamWArgs& args, int64_t n, const void* grad, DType grad_type, float* master,
             float* exp_avg, float* exp_avg_sq, void* param, DType param_type) override {
    Count(Kernel::kUpdate);
    GuardedOps::AdamW(args, n, grad, grad_type, master, exp_avg, exp_avg_sq, param, param_type);
  }

 private:
  void Count(Kernel kernel) {
    if (kernel != kernel_ || --call_ != 0) return;
    device_.compute()->Enqueue([] { return absl::DataLossError("a kernel broke"); });
  }

  GuardedDevice& device_;
  const Kernel kernel_;
  int call_;
};

class GuardedFaults : public testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override { start_ = std::chrono::steady_clock::now(); }
  void TearDown() override {
    EXPECT_LT(std::chrono::steady_clock::now() - start_, kSoon) << "somebody waited for a deadline";
  }
  RankBackend Backend() const { return GuardedBackend(GetParam()); }

 private:
  std::chrono::steady_clock::time_point start_;
};
INSTANTIATE_TEST_SUITE_P(Seeds, GuardedFaults, testing::Range<uint64_t>(0, kSchedules + 1));

TEST_P(GuardedFaults, AKernelThatFailsEndsTheJobBeforeTheNextStepIsCounted) {
  const MemoryDataset data = TinyData();
  struct Fault {
    Kernel kernel;
    int call;
    size_t steps;  // that may be counted
  };
  // The first products of forward, head and backward; an update of the first step. That is known
  // when the next step ends.
  const std::vector<Fault> faults = {{Kernel::kProduct, 5, 0},
                                     {Kernel::kProduct, 16, 0},
                                     {Kernel::kProduct, 30, 0},
                                     {Kernel::kUpdate, 3, 1}};
  for (const Shape shape : {Shape{1, 0}, Shape{2, 0}, Shape{2, 1}, Shape{3, 2}, Shape{2, 3}}) {
    for (const Fault& fault : faults) {
      SCOPED_TRACE(testing::Message() << "stage " << shape.stage << " world " << shape.world
                                      << " call " << fault.call);
      RunOptions options{.world = shape.world, .backend = Backend()};
      std::atomic<int> made{0};
      options.backend.ops = [&](Device* device) -> std::unique_ptr<Ops> {
        auto* const guarded = static_cast<GuardedDevice*>(device);
        if (made++ > 0) return std::make_unique<GuardedOps>(guarded);
        return std::make_unique<FailingOps>(guarded, fault.kernel, fault.call);
      };
      const auto results = TrainJob(Spec(TinyGpt2(), shape, Offload::kNone), options, data);
      bool told = false;
      for (const RankResult& result : results) {
        EXPECT_FALSE(result.status.ok());
        EXPECT_LE(result.records.size(), fault.steps);
        told |= result.status.message().find("a kernel broke") != std::string::npos;
      }
      EXPECT_TRUE(told) << results[0].status;
    }
  }
}

TEST_P(GuardedFaults, AnUpdateThatFailsInTheLastStepIsTold) {
  const MemoryDataset data = TinyData();
  RunOptions options{.world = 1, .backend = Backend()};
  options.backend.ops = [](Device* device) {
    return std::make_unique<FailingOps>(static_cast<GuardedDevice*>(device), Kernel::kUpdate, 1);
  };
  const auto results =
      TrainJob(Spec(TinyGpt2(), {1, 3}, Offload::kNone, {"steps=1"}), options, data);
  EXPECT_EQ(results[0].status, absl::DataLossError("a kernel broke"));
}

// Between any two calls of a unit; a checkpoint of the step before may be on its way.
TEST_P(GuardedFaults, AnAbortInMidStepEndsEveryRank) {
  const MemoryDataset data = TinyData();
  for (const Shape shape : {Shape{2, 0}, Shape{2, 1}, Shape{3, 2}, Shape{3, 3}}) {
    for (const int call : {1, 4, 9, 17, 26}) {
      SCOPED_TRACE(testing::Message() << "stage " << shape.stage << " call " << call);
      MemoryFolder folder;
      v1::JobSpec spec = SavingSpec(TinyGpt2(), shape, 4, folder / "saves", {"bf16.enabled=true"});
      spec.mutable_checkpoint()->set_interval_steps(1);
      RunOptions options{.world = shape.world, .backend = Backend()};
      Communicator* first = nullptr;  // rank 0's, on whose thread both are used
      options.backend.comm = [&](std::unique_ptr<Communicator> comm, Device* device) {
        auto staged = MakeStagedCommunicator(std::move(comm), device);
        if (staged->rank() == 0) first = staged.get();
        return staged;
      };
      int calls = 0;
      options.on_progress = [&](int rank, const std::string&) {
        if (rank == 0 && ++calls == call) first->Abort("generation 7 has begun");
      };
      const auto results = TrainJob(spec, options, data);
      for (const RankResult& result : results) EXPECT_FALSE(result.status.ok());
      EXPECT_THAT(std::string(results[0].status.message()), HasSubstr("generation 7 has begun"));
    }
  }
}

TEST_P(GuardedFaults, StoresThatAreAbortedInMidStepEndEveryRank) {
  const MemoryDataset data = TinyData();
  for (const Shape shape : {Shape{2, 1}, Shape{2, 2}, Shape{2, 3}}) {
    for (const Offload offload : OffloadsOf(shape.stage)) {
      for (const int call : {1, 4, 9, 17, 26}) {
        SCOPED_TRACE(testing::Message() << "stage " << shape.stage << " call " << call);
        const v1::JobSpec spec = Spec(TinyGpt2(), shape, offload, {"bf16.enabled=true"});
        MemoryStores stores(spec, {});
        RunOptions options{.world = shape.world, .backend = Backend()};
        int calls = 0;
        options.on_progress = [&](int rank, const std::string&) {
          if (rank == 0 && ++calls == call) stores.Abort("generation 7 has begun");
        };
        const auto results = TrainOffloaded(spec, options, data, &stores);
        bool told = false;
        for (const RankResult& result : results) {
          EXPECT_FALSE(result.status.ok());
          told |= result.status.message().find("generation 7 has begun") != std::string::npos;
        }
        EXPECT_TRUE(told) << results[0].status;
      }
    }
  }
}

TEST_P(GuardedFaults, AnErrorOfAStoreIsTheRanksThatHadIt) {
  const MemoryDataset data = TinyData();
  for (const auto call : {MemoryStores::Call::kPush, MemoryStores::Call::kPull}) {
    for (const Offload offload : {Offload::kOptimizer, Offload::kAll}) {
      const v1::JobSpec spec = Spec(TinyGpt2(), {2, 3}, offload, {"bf16.enabled=true"});
      MemoryStores::Options failing;
      failing.on_call = [&](MemoryStores::Call seen, int rank, uint64_t step,
                            int unit) -> absl::Status {
        if (seen != call || rank != 1 || step != 2 || unit != 1) return absl::OkStatus();
        return absl::DeadlineExceededError("store-0: chunk 1 of step 2: nothing moved for 3s");
      };
      MemoryStores stores(spec, failing);
      const auto results = TrainOffloaded(spec, {.world = 2, .backend = Backend()}, data, &stores);
      EXPECT_THAT(std::string(results[1].status.message()), HasSubstr("chunk 1 of step 2"));
      EXPECT_FALSE(results[0].status.ok());
    }
  }
}

TEST_P(GuardedFaults, ANonFiniteLossNamesItsSamplesOnAllRanks) {
  const MemoryDataset data = TinyData();
  for (const Shape shape : {Shape{2, 0}, Shape{2, 3}}) {
    RunOptions options{.world = shape.world, .backend = Backend()};
    options.prepare = [](int, Trainer* trainer) {
      std::vector<float> values(32, 0.0f);
      values[3] = std::numeric_limits<float>::quiet_NaN();
      return trainer->SetTensor("ln_f.bias", values);
    };
    const auto results = TrainJob(Spec(TinyGpt2(), shape, Offload::kNone), options, data);
    for (const RankResult& result : results) {
      EXPECT_THAT(std::string(result.status.message()),
                  HasSubstr("step 1: non-finite loss (nan) on rank 0 in micro-batch 0"));
    }
  }
}

}  // namespace
}  // namespace zeroshard
