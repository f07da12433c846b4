// Jobs whose state is in the shard stores of the process.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/worker/train/checkpoint_harness.h"
#include "tests/worker/train/memory_stores.h"

namespace zeroshard {

// Documents of 7 tokens, whatever the text.
class Documents : public MemoryDataset {
 public:
  using MemoryDataset::MemoryDataset;
  bool masks_documents() const override { return true; }
  void DocumentStarts(int64_t, absl::Span<int32_t> starts) const override {
    for (size_t i = 0; i < starts.size(); ++i) starts[i] = static_cast<int32_t>(i / 7 * 7);
  }
};

// How a job is offloaded.
enum class Offload { kNone, kOptimizer, kAll };

inline v1::JobSpec Spec(const std::string& text, Shape shape, Offload offload,
                        std::vector<std::string> more = {}) {
  if (offload != Offload::kNone) more.push_back("zero_optimization.offload_optimizer.device=cpu");
  if (offload == Offload::kAll) more.push_back("zero_optimization.offload_param.device=cpu");
  more.push_back(absl::StrFormat("resources.workers=%d", shape.world));
  more.push_back(absl::StrFormat("zero_optimization.stage=%d", shape.stage));
  return MakeSpec(text, more);
}

inline std::vector<RankResult> TrainOffloaded(const v1::JobSpec& spec, RunOptions options,
                                              const TokenDataset& data, MemoryStores* stores) {
  options.store = [stores](int rank) { return stores->MakeRank(rank); };
  return TrainJob(spec, options, data);
}

// What every rank agrees on, with the digest of the weights that the stores have at the end.
inline std::string OffloadedFingerprint(const v1::JobSpec& spec, int world,
                                        const TokenDataset& data, uint64_t seed = 1) {
  MemoryStores stores(spec, {.seed = seed});
  const auto results = TrainOffloaded(spec, {.world = world}, data, &stores);
  for (const RankResult& result : results) {
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.records.size(), spec.steps());
    EXPECT_EQ(result.digest, "");
    EXPECT_EQ(Fingerprint(result), Fingerprint(results[0])) << "ranks disagree";
  }
  stores.WaitForVersion(spec.steps());
  return Fingerprint(results[0]) + stores.Digest();
}

inline std::vector<Offload> OffloadsOf(int stage) {
  if (stage == 3) return {Offload::kOptimizer, Offload::kAll};
  return {Offload::kOptimizer};
}

}  // namespace zeroshard
