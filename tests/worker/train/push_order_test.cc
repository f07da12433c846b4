// Gradients leave while backward goes on: the network and the stores work beside it.
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/worker/train/cluster_harness.h"
#include "tests/worker/train/memory_stores.h"

namespace zeroshard {
namespace {

struct Case {
  const char* name;
  int world;
  int stage;
  std::vector<std::string> more;
};

class PushOrder : public testing::TestWithParam<Case> {};

// Three micro-batches of two samples. Where bf16 gradients are added up in fp32 they are rounded on
// the training thread once they are reduced, which without overlap is at once.
INSTANTIATE_TEST_SUITE_P(
    Of, PushOrder,
    testing::Values(Case{"Stage1InOneRound", 3, 1, {"bf16.enabled=true"}},
                    Case{"Stage2Accumulated", 2, 2, {"bf16.enabled=false"}},
                    Case{"Stage2AccumulatedAndRounded",
                         2,
                         2,
                         {"bf16.enabled=true", "zero_optimization.overlap_comm=false"}},
                    Case{"Stage2OfOneRank", 1, 2, {"bf16.enabled=false"}},
                    Case{"Stage3InOneRound", 3, 3, {"bf16.enabled=true"}},
                    Case{"Stage3Parameters",
                         2,
                         3,
                         {"bf16.enabled=false", "zero_optimization.offload_param.device=cpu"}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(PushOrder, TheLastBlocksGradientsAreInTheStoresBeforeBackwardReachesTheFirstBlock) {
  const Case& c = GetParam();
  std::vector<std::string> more = c.more;
  more.push_back("zero_optimization.offload_optimizer.device=cpu");
  more.push_back(absl::StrFormat("resources.workers=%d", c.world));
  more.push_back(absl::StrFormat("zero_optimization.stage=%d", c.stage));
  const v1::JobSpec spec = MakeSpec(TinyGpt2(), more);
  const ModelTable model = *MakeModelTable(spec.model());
  const ZeroPolicy policy = MakeZeroPolicy(model, MakeZeroOptions(spec, c.world));
  const int head = static_cast<int>(model.units.size()) - 1, last_block = head - 1;
  ASSERT_EQ(model.units[static_cast<size_t>(last_block)].name, "blocks.2");
  std::vector<uint64_t> early, each_step;  // bytes, by rank
  for (int rank = 0; rank < c.world; ++rank) {
    int64_t elements = 0;
    for (int unit : {last_block, head})
      elements += policy.StateEnd(unit, rank) - policy.StateBegin(unit, rank);
    early.push_back(static_cast<uint64_t>(elements) * SizeOf(ComputeType(spec)));
    each_step.push_back(PlanRank(model, policy, rank).push);
    EXPECT_LT(early.back(), each_step.back());
  }

  MemoryStores stores(spec, {});
  RunOptions options{.world = c.world};
  options.store = [&](int rank) { return stores.MakeRank(rank); };
  std::mutex mutex;
  std::map<int, uint64_t> entered;  // the first block, forward and backward; by rank
  uint64_t looked = 0;
  options.on_progress = [&](int rank, const std::string& unit) {
    if (unit != "blocks.0") return;
    const auto r = static_cast<size_t>(rank);
    uint64_t before = 0;
    {
      std::lock_guard lock(mutex);
      before = entered[rank]++;
    }
    const auto of_a_step = 2 * static_cast<uint64_t>(policy.rounds);
    const uint64_t steps = before / of_a_step, in_step = before % of_a_step;
    // Backward has just left the second block.
    if (in_step + 1 == of_a_step) {
      EXPECT_TRUE(stores.WaitForPushed(rank, steps * each_step[r] + early[r]))
          << "rank " << rank << " has pushed " << stores.pushed(rank) << " bytes before step "
          << steps + 1 << "'s last backward reached the first block, of the step's " << each_step[r]
          << " at least " << early[r] << " are due";
      std::lock_guard lock(mutex);
      ++looked;
    } else if (in_step % 2 == 1) {
      EXPECT_EQ(stores.pushed(rank), steps * each_step[r]) << "these are not final yet";
    }
  };
  const auto results = TrainJob(spec, options, TinyData());
  for (const RankResult& result : results) ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(looked, spec.steps() * static_cast<uint64_t>(c.world));
  for (int rank = 0; rank < c.world; ++rank)
    EXPECT_EQ(stores.pushed(rank), each_step[static_cast<size_t>(rank)] * spec.steps());
}

}  // namespace
}  // namespace zeroshard
