#include "worker/zero/engine.h"

#include <memory>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/memory_rendezvous.h"

namespace zeroshard {
namespace {

v1::ModelSpec TinyModel() {
  v1::ModelSpec model;
  model.set_architecture("gpt2");
  model.set_hidden_size(32);
  model.set_layers(2);
  model.set_heads(2);
  model.set_sequence_length(8);
  model.set_vocab_size(61);
  return model;
}

// One rank with everything an engine needs.
class Rank {
 public:
  Rank(const ZeroOptions& options, int rank, Rendezvous* rendezvous)
      : device_(MakeCpuDevice()), ops_(MakeCpuOps(1)), model_(*MakeModelTable(TinyModel())) {
    policy_ = MakeZeroPolicy(model_, options);
    CommunicatorOptions gloo;
    gloo.rank = rank;
    gloo.size = options.world;
    gloo.host = "127.0.0.1";
    gloo.operation_timeout = absl::Seconds(2);
    comm_ = *MakeGlooCommunicator(gloo, rendezvous, device_.get());
    engine_ = *ZeroEngine::Create(&model_, &policy_, 1, device_.get(), ops_.get(), comm_.get());
  }
  ZeroEngine& engine() { return *engine_; }
  Communicator& comm() { return *comm_; }
  Device& device() { return *device_; }
  const ModelTable& model() const { return model_; }
  void DropEngine() { engine_.reset(); }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Ops> ops_;
  ModelTable model_;
  ZeroPolicy policy_;
  std::unique_ptr<Communicator> comm_;
  std::unique_ptr<ZeroEngine> engine_;
};

TEST(ZeroEngineTest, UnitsOutOfOrderAreRefusedNotGathered) {
  Rank rank({.stage = 3}, 0, nullptr);
  rank.engine().BeginStep(1);
  rank.engine().BeginRound(0);
  EXPECT_EQ(rank.engine().BeforeForward(2).status().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(rank.engine().BeforeForward(0).ok());
  EXPECT_TRUE(rank.engine().AfterForward(0).ok());
  EXPECT_EQ(rank.engine().BeforeBackward(1).status().code(), absl::StatusCode::kInternal);
}

TEST(ZeroEngineTest, AnEvaluationHasForwardsOnlyAndTrainingGoesOnBehindIt) {
  Rank rank({.stage = 3}, 0, nullptr);
  const int units = static_cast<int>(rank.model().units.size());
  for (uint64_t pass : {1, 2}) {
    rank.engine().BeginEvaluation(pass);
    for (int u = 0; u < units; ++u) {
      ASSERT_TRUE(rank.engine().BeforeForward(u).ok()) << u;
      ASSERT_TRUE(rank.engine().AfterForward(u).ok());
    }
    EXPECT_EQ(rank.engine().BeforeBackward(units - 2).status().code(), absl::StatusCode::kInternal);
    rank.engine().BeginStep(pass + 1);
    rank.engine().BeginRound(0);
    for (int u = 0; u < units - 1; ++u) {
      ASSERT_TRUE(rank.engine().BeforeForward(u).ok());
      ASSERT_TRUE(rank.engine().AfterForward(u).ok());
    }
    ASSERT_TRUE(rank.engine().BeforeForward(units - 1).ok());
    ASSERT_TRUE(rank.engine().AfterBackward(units - 1).ok());
    EXPECT_TRUE(rank.engine().BeforeBackward(units - 2).ok());
    ASSERT_TRUE(rank.engine().AfterBackward(units - 2).ok());
    ASSERT_TRUE(rank.engine().BeforeBackward(units - 3).ok());
    ASSERT_TRUE(rank.engine().AfterBackward(units - 3).ok());
  }
}

TEST(ZeroEngineTest, ASinkRefusesRangesThatAreNotItsUnits) {
  Rank rank({.stage = 2}, 0, nullptr);
  rank.engine().BeginStep(1);
  rank.engine().BeginRound(0);
  GradientSink* sink = rank.engine().Sink(1);
  const int64_t length = rank.model().units[1].length;
  EXPECT_FALSE(sink->Acquire(0, length + 64).ok());
  EXPECT_FALSE(sink->Acquire(1, 64).ok());
  EXPECT_FALSE(sink->Acquire(-64, 64).ok());
  EXPECT_FALSE(sink->Done(0, 64).ok()) << "nothing was acquired";
  ASSERT_TRUE(sink->Acquire(64, 128).ok());
  EXPECT_FALSE(sink->Done(0, 64).ok()) << "another range was";
}

// A backward that ends half-way, with gradients on their way and parameters prefetched, while the
// other rank never comes: the engine goes away as soon as the communicator is aborted.
TEST(ZeroEngineTest, GoesAwayInTheMiddleOfABackward) {
  MemoryRendezvous rendezvous;
  const ZeroOptions options{
      .stage = 3, .world = 2, .micro_batches = 2, .reduce_bucket = 64, .persistence_threshold = 0};
  std::unique_ptr<Rank> ranks[2];
  std::thread other([&] { ranks[1] = std::make_unique<Rank>(options, 1, &rendezvous); });
  ranks[0] = std::make_unique<Rank>(options, 0, &rendezvous);
  other.join();
  Rank& rank = *ranks[0];
  rank.engine().BeginStep(1);
  rank.engine().BeginRound(0);
  GradientSink* sink = rank.engine().Sink(1);
  auto memory = sink->Acquire(0, rank.model().units[1].length);
  ASSERT_TRUE(memory.ok());
  ASSERT_TRUE(sink->Done(64, 192).ok());
  rank.comm().Abort("stopped");
  EXPECT_FALSE(rank.engine().BeforeForward(0).ok());
  rank.DropEngine();
  EXPECT_EQ(rank.device().memory().Bytes(MemoryKind::kParameters), 0);
  EXPECT_EQ(rank.device().memory().Bytes(MemoryKind::kGradients), 0);
  ranks[1]->comm().Abort("stopped");
}

TEST(ZeroEngineTest, ATensorThatIsNotThereIsNamedWithTheNearest) {
  Rank rank({.stage = 1}, 0, nullptr);
  const absl::Status status = rank.engine().GatherTensor("blocks.0.atn.q.weight").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("blocks.0.attn.q.weight"));
  EXPECT_EQ(rank.engine().SetTensor("ln_f.bias", std::vector<float>(3)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ZeroEngineTest, LoadingEndsWhenItIsStopped) {
  std::unique_ptr<Device> device = MakeCpuDevice();
  std::unique_ptr<Ops> ops = MakeCpuOps(1);
  const ModelTable model = *MakeModelTable(TinyModel());
  const ZeroPolicy policy = MakeZeroPolicy(model, {});
  auto comm = MakeGlooCommunicator({}, nullptr, device.get());
  ASSERT_TRUE(comm.ok());
  const std::atomic<bool> stop{true};
  const auto engine =
      ZeroEngine::Create(&model, &policy, 1, device.get(), ops.get(), comm->get(), &stop);
  EXPECT_EQ(engine.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(device->memory().Bytes(MemoryKind::kParameters), 0);
}

TEST(ZeroEngineTest, OffloadNeedsAStoreAndAStage) {
  std::unique_ptr<Device> device = MakeCpuDevice();
  std::unique_ptr<Ops> ops = MakeCpuOps(1);
  const ModelTable model = *MakeModelTable(TinyModel());
  auto comm = MakeGlooCommunicator({}, nullptr, device.get());
  ASSERT_TRUE(comm.ok());
  const ZeroPolicy policy = MakeZeroPolicy(model, {.stage = 1, .offload_optimizer = true});
  const auto engine = ZeroEngine::Create(&model, &policy, 1, device.get(), ops.get(), comm->get());
  EXPECT_EQ(engine.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(engine.status().message()), testing::HasSubstr("no shard store"));
}

}  // namespace
}  // namespace zeroshard
