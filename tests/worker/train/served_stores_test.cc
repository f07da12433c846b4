// Training over the worker's own client and real stores: the bits of jobs without offload.
#include "tests/worker/train/served_stores.h"

#include "tests/worker/train/checkpoint_harness.h"
#include "tests/worker/train/memory_stores.h"

namespace zeroshard {
namespace {

struct Case {
  int world = 1;
  int stage = 1;
  bool param = false;  // offload_param too
  int stores = 1;
  int replicas = 1;
};

v1::JobSpec Spec(const Case& c, bool offload, std::vector<std::string> more) {
  more.push_back(absl::StrFormat("resources.workers=%d", c.world));
  more.push_back(absl::StrFormat("zero_optimization.stage=%d", c.stage));
  if (offload) {
    more.push_back("zero_optimization.offload_optimizer.device=cpu");
    more.push_back(absl::StrFormat("store.replicas=%d", c.replicas));
    if (c.param) more.push_back("zero_optimization.offload_param.device=cpu");
  }
  return MakeSpec(TinyGpt2(), more);
}

// Chunks of 4096 elements: several a unit, shared by ranks.
constexpr int64_t kElements = 4096;

class ServedStoresTest : public testing::TestWithParam<const char*> {};
// Of the last the first steps are skipped.
INSTANTIATE_TEST_SUITE_P(Precision, ServedStoresTest,
                         testing::Values("bf16.enabled=false", "bf16.enabled=true",
                                         "bf16={enabled: true, stochastic_rounding: true}",
                                         "fp16={enabled: true, initial_scale_power: 19, "
                                         "hysteresis: 1}"),
                         [](const auto& info) {
                           const std::string type(info.param);
                           if (type.starts_with("fp16")) return std::string("fp16");
                           if (type.starts_with("bf16={")) return std::string("stochastic");
                           return std::string(type.ends_with("true") ? "bf16" : "fp32");
                         });

TEST_P(ServedStoresTest, HistoriesAndWeightsAreThoseWithoutOffload) {
  const MemoryDataset data = TinyData();
  for (const Case& c : {Case{1, 1, false, 1, 1},
                        {2, 1, false, 3, 1},
                        {2, 2, false, 1, 1},
                        {3, 2, false, 3, 2},
                        {2, 3, false, 3, 1},
                        {2, 3, true, 2, 2},
                        {1, 3, true, 3, 1},
                        {4, 3, true, 1, 1}}) {
    SCOPED_TRACE(absl::StrFormat("world %d stage %d param %d stores %d replicas %d", c.world,
                                 c.stage, c.param, c.stores, c.replicas));
    const std::string expected =
        TrainFingerprint(Spec(c, false, {GetParam()}), {.world = c.world}, data);
    const v1::JobSpec spec = Spec(c, true, {GetParam()});
    ServedStores stores(spec, c.stores, kElements);
    stores.Open();
    RunOptions options{.world = c.world};
    options.store = [&](int rank) { return stores.MakeRank(rank); };
    const auto results = TrainJob(spec, options, data);
    ExpectAllOk(results);
    EXPECT_EQ(Fingerprint(results[0]) + stores.Digest(spec.steps()), expected);
    uint64_t pushed = 0;
    for (int rank = 0; rank < c.world; ++rank) {
      const auto model = MakeModelTable(spec.model());
      pushed += PlanRank(*model, MakeZeroPolicy(*model, MakeZeroOptions(spec, c.world)), rank).push;
    }
    EXPECT_EQ(stores.pushed(), pushed * spec.steps());
  }
}

// No job without offload has it: the reference is the formula, in the test's own stores.
TEST_P(ServedStoresTest, SgdHasTheNumbersOfItsFormulaAtEveryShape) {
  const MemoryDataset data = TinyData();
  const std::vector<std::string> more = {
      GetParam(), "deterministic=true",
      "optimizer={type: SGD, params: {lr: 0.3, momentum: 0.9, weight_decay: 0.01}}"};
  const v1::JobSpec reference = Spec({2, 2, false, 1, 1}, true, more);
  MemoryStores formula(reference, {});
  RunOptions options{.world = 2};
  options.store = [&](int rank) { return formula.MakeRank(rank); };
  const auto wanted = TrainJob(reference, options, data);
  ExpectAllOk(wanted);
  formula.WaitForVersion(reference.steps());
  const std::string expected = Fingerprint(wanted[0]) + formula.Digest();
  EXPECT_NE(formula.Digest(), MemoryStores(reference, {}).Digest()) << "nothing was trained";
  for (const Case& c : {Case{1, 1, false, 1, 1}, {2, 2, false, 3, 2}, {3, 3, true, 2, 1}}) {
    const v1::JobSpec spec = Spec(c, true, more);
    ServedStores stores(spec, c.stores, kElements);
    stores.Open();
    RunOptions run{.world = c.world};
    run.store = [&](int rank) { return stores.MakeRank(rank); };
    const auto results = TrainJob(spec, run, data);
    ExpectAllOk(results);
    EXPECT_EQ(Fingerprint(results[0]) + stores.Digest(spec.steps()), expected)
        << "world " << c.world << " stage " << c.stage;
  }
}

// A generation that ends in the middle of a step, and one of other ranks behind it.
TEST_P(ServedStoresTest, TheNextGenerationGoesOnWhereTheLastCommitted) {
  const MemoryDataset data = TinyData();
  const std::vector<std::string> more = {GetParam(), "deterministic=true"};
  const Case first{2, 3, true, 2, 1}, second{3, 3, true, 2, 1};
  const std::string expected = TrainFingerprint(Spec(first, false, more), {.world = 2}, data);
  const v1::JobSpec spec = Spec(first, true, more);
  ServedStores stores(spec, 2, kElements);
  stores.Open();
  RunOptions options{.world = 2};
  std::vector<StateStore*> views(2);
  options.store = [&](int rank) {
    auto store = stores.MakeRank(rank);
    views[static_cast<size_t>(rank)] = store.get();
    return store;
  };
  // Rank 1 dies in the backward of step 3, when some of its gradients have left.
  int backwards = 0;
  options.on_progress = [&](int rank, const std::string& unit) {
    if (rank == 1 && unit == "blocks.0" && ++backwards == 2 * 2 * 2 + 4) views[1]->Abort("killed");
  };
  const auto before = TrainJob(spec, options, data);
  for (const RankResult& result : before) EXPECT_FALSE(result.status.ok());
  const size_t committed = before[0].records.size();
  ASSERT_EQ(committed, 2u);
  stores.Open();
  RunOptions next{.world = 3};
  next.first_step = committed + 1;
  next.next_sample = 6 * committed;
  next.loss_scale = stores.loss_scale();
  next.store = [&](int rank) { return stores.MakeRank(rank); };
  const auto after = TrainJob(Spec(second, true, more), next, data);
  ExpectAllOk(after);
  RankResult all = before[0];
  all.records.insert(all.records.end(), after[0].records.begin(), after[0].records.end());
  EXPECT_EQ(Fingerprint(all) + stores.Digest(spec.steps()), expected);
}

}  // namespace
}  // namespace zeroshard
