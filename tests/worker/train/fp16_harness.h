// Jobs in fp16: what they come to, and two that skip steps.
#pragma once

#include <string>
#include <vector>

#include "tests/worker/train/checkpoint_harness.h"
#include "worker/data/dataset.h"

namespace zeroshard {

inline v1::JobSpec Fp16(const std::string& text, Shape shape, std::vector<std::string> more = {}) {
  more.insert(more.begin(), "fp16.enabled=true");
  more.push_back(absl::StrFormat("resources.workers=%d", shape.world));
  more.push_back(absl::StrFormat("zero_optimization.stage=%d", shape.stage));
  return MakeSpec(text, more);
}

// Fingerprint, with the scales and what was skipped.
inline std::string ScaledFingerprint(const RankResult& result) {
  std::string text;
  for (const v1::StepRecord& r : result.records) {
    EXPECT_TRUE(r.has_loss_scale());
    absl::StrAppendFormat(&text, "%a%s ", r.loss_scale(), r.skipped() ? " skipped" : "");
  }
  return text + Fingerprint(result);
}

// What every rank agrees on.
inline std::string TrainScaled(const v1::JobSpec& spec, const RunOptions& options,
                               const TokenDataset& data) {
  const std::vector<RankResult> results = TrainJob(spec, options, data);
  for (const RankResult& result : results) {
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(ScaledFingerprint(result), ScaledFingerprint(results[0])) << "ranks disagree";
  }
  return ScaledFingerprint(results[0]);
}

inline std::vector<double> ScalesOf(const RankResult& result) {
  std::vector<double> scales;
  for (const v1::StepRecord& r : result.records) scales.push_back(r.loss_scale());
  return scales;
}
inline std::vector<uint64_t> SkippedOf(const RankResult& result) {
  std::vector<uint64_t> steps;
  for (const v1::StepRecord& r : result.records) {
    if (r.skipped()) steps.push_back(r.step());
  }
  return steps;
}

// Gradients of 48 tokens that are scaled by 2^24 / 32 leave fp16's range; by 2^14 / 32 they do not.
inline const std::vector<std::string> kOverflowsAtFirst = {
    "fp16.initial_scale_power=24", "fp16.hysteresis=1", "fp16.loss_scale_window=2", "steps=16",
    "deterministic=true"};

// A value that only one rank sees: its micro-batch has a token whose embedding fp16 cannot hold.
constexpr int32_t kRareToken = 60;
inline MemoryDataset DataWithARareToken() {
  // The chain ends below it.
  std::vector<int32_t> tokens = ChainTokens(24 * 40 + 1, kRareToken);
  const SampleOrder order(40, 7);
  tokens[static_cast<size_t>(order.At(2) * 24 + 3)] = kRareToken;  // in micro-batch 1 of step 1
  return {tokens, 24};
}
inline absl::Status MakeTheRareTokenOverflow(int, Trainer* trainer) {
  auto table = trainer->GatherTensor("embed.weight");
  if (!table.ok()) return table.status();
  (*table)[kRareToken * 32 + 1] = 1e5f;
  return trainer->SetTensor("embed.weight", *table);
}
inline v1::JobSpec OneOverflow(Shape shape) {
  return Fp16(
      TinyLlama(), shape,
      {"fp16.initial_scale_power=10", "deterministic=true", "optimizer.params.weight_decay=0"});
}

}  // namespace zeroshard
