// What an undisturbed run of a job computes, with a chunk's state reduced to a hash: the chain that
// every disturbed run must follow too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/chunk_table.h"
#include "zeroshard/v1/cluster.pb.h"
#include "zeroshard/v1/job.pb.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::simulator {

class Reference {
 public:
  explicit Reference(const v1::JobSpec& spec);

  const v1::JobSpec& spec() const { return spec_; }
  const ModelTable& model() const { return model_; }
  const ChunkTable& table() const { return table_; }

  // Of every chunk, after `step`.
  const std::vector<uint64_t>& State(uint64_t step) const { return states_[step]; }
  // Of the gradient of elements [0, end) of a chunk in `step`, where `weights` is HashOfWeights of
  // the state that it was computed with: a range's gradient is the difference of its ends, so the
  // ranges of any partition that tiles a chunk have the same sum.
  static uint64_t GradientPrefix(uint64_t weights, uint64_t step, uint32_t chunk, uint64_t end);
  static uint64_t HashOfWeights(const std::vector<uint64_t>& state);
  static uint64_t Applied(uint64_t state, const v1::StepDecision& decision, uint64_t gradient);

  // What rank 0 reports of a step, and what must be decided then, but for the generation, the epoch
  // and the snapshot.
  const v1::StepRecord& Record(uint64_t step) const { return records_[step]; }
  v1::StepDecision Decision(uint64_t step) const;
  // Whether the loss on the validation set is measured after a step, and what it is with the state
  // of every chunk then.
  bool Evaluates(uint64_t step) const;
  static double EvalLoss(const std::vector<uint64_t>& state);
  uint64_t NextSample(uint64_t step) const;
  static constexpr uint64_t kSamples = 1000;

  // Of the state after the last step, as all stores together have it.
  std::string Digest() const;
  static uint64_t DigestLow(uint32_t chunk, uint64_t state);
  static uint64_t DigestHigh(uint32_t chunk, uint64_t state);

 private:
  v1::JobSpec spec_;
  ModelTable model_;
  ChunkTable table_;
  std::vector<std::vector<uint64_t>> states_;  // by step
  std::vector<v1::StepRecord> records_;        // by step; [0] is empty
};

}  // namespace zeroshard::simulator
