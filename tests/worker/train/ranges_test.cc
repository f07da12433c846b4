// The ranges that a profiler of the device is told of.

#include "gmock/gmock.h"
#include "tests/worker/train/cluster_harness.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAreArray;

// A CPU with a profiler: what is open, and each name with its depth when it begins.
class Profiled : public Device {
 public:
  struct Profile {
    std::vector<std::string> open;
    std::vector<std::pair<size_t, std::string>> begun;
    bool ended_too_often = false;
  };
  explicit Profiled(Profile* profile) : profile_(*profile) {}

  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override {
    return cpu_->Allocate(bytes, kind);
  }
  absl::StatusOr<Buffer> AllocateHost(size_t bytes) override { return cpu_->AllocateHost(bytes); }
  Stream* compute() override { return cpu_->compute(); }
  std::unique_ptr<Stream> NewStream(const std::string& name) override {
    return cpu_->NewStream(name);
  }
  bool is_host() const override { return true; }
  const MemoryAccounting& memory() const override { return cpu_->memory(); }
  std::string name() const override { return cpu_->name(); }
  void BeginRange(const std::string& name) override {
    profile_.begun.emplace_back(profile_.open.size(), name);
    profile_.open.push_back(name);
  }
  void EndRange() override {
    profile_.ended_too_often |= profile_.open.empty();
    if (!profile_.open.empty()) profile_.open.pop_back();
  }

 private:
  const std::unique_ptr<Device> cpu_ = MakeCpuDevice();
  Profile& profile_;
};

// Rank 0's profile of one step of GPT-2 with three blocks, two micro-batches a rank.
Profiled::Profile TrainOneStep(int stage) {
  std::vector<Profiled::Profile> profiles(2);
  RunOptions options{.world = 2};
  options.backend.device = [&](int rank) {
    return std::make_unique<Profiled>(&profiles[static_cast<size_t>(rank)]);
  };
  const v1::JobSpec spec = MakeSpec(
      TinyGpt2(),
      {"steps=1", "train_batch_size=8", absl::StrFormat("zero_optimization.stage=%d", stage)});
  const MemoryDataset data = TinyData();
  for (const RankResult& result : TrainJob(spec, options, data))
    EXPECT_TRUE(result.status.ok()) << result.status;
  return profiles[0];
}

std::vector<std::string> AtDepth(const Profiled::Profile& profile, size_t depth) {
  std::vector<std::string> names;
  for (const auto& [at, name] : profile.begun)
    if (at == depth) names.push_back(name);
  return names;
}

class Ranges : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, Ranges, ::testing::Values(0, 3));

TEST_P(Ranges, OfAStepNestAndNameEveryPhaseAndUnitInOrder) {
  const Profiled::Profile profile = TrainOneStep(GetParam());
  EXPECT_FALSE(profile.ended_too_often);
  EXPECT_TRUE(profile.open.empty());
  EXPECT_THAT(AtDepth(profile, 0), ElementsAreArray({"step 1"}));
  std::vector<std::string> want;
  for (int round = 0; round < 2; ++round) {
    want.insert(want.end(), {"data", "forward embedding", "forward blocks.0", "forward blocks.1",
                             "forward blocks.2", "backward head", "backward blocks.2",
                             "backward blocks.1", "backward blocks.0", "backward embedding"});
  }
  want.insert(want.end(), {"communication", "optimizer", "barrier", "barrier"});
  EXPECT_THAT(AtDepth(profile, 1), ElementsAreArray(want));
}

TEST_P(Ranges, OfWaitsAreWithinThePhaseThatWaits) {
  const Profiled::Profile profile = TrainOneStep(GetParam());
  const std::vector<std::string> waits = AtDepth(profile, 2);
  ASSERT_FALSE(waits.empty());
  EXPECT_THAT(waits, ::testing::Each("wait for ranks"));
  EXPECT_TRUE(AtDepth(profile, 3).empty());
  // At stage 3 every use of a unit waits for its gather.
  size_t last_unit = 0;
  std::vector<std::string> waited_for;
  for (size_t i = 0; i < profile.begun.size(); ++i) {
    if (profile.begun[i].first == 1) last_unit = i;
    if (profile.begun[i].first == 2) waited_for.push_back(profile.begun[last_unit].second);
  }
  for (const char* unit :
       {"forward embedding", "forward blocks.1", "backward head", "backward blocks.1"}) {
    EXPECT_EQ(std::count(waited_for.begin(), waited_for.end(), unit) > 0, GetParam() == 3) << unit;
  }
}

}  // namespace
}  // namespace zeroshard
