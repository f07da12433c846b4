// What a rank moved in the last step beside which nothing else travelled, so that it can be held
// against the plan (common/plan/planner.h).
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "worker/comm/communicator.h"
#include "worker/zero/state_store.h"

namespace zeroshard {

struct StepTraffic {
  uint64_t step = 0;                // 0: there was no such step yet
  uint64_t sent = 0;                // to other ranks; bytes
  uint64_t pushed = 0, pulled = 0;  // to and from the shard stores
};

// Mark and Spoil: the training thread. last: any.
class StepMeter {
 public:
  // Both outlive this; `offload` may be null.
  StepMeter(const TrafficCounters* traffic, const OffloadCounters* offload)
      : StepMeter(std::vector<const TrafficCounters*>{traffic}, offload) {}
  // The same of a rank with several communicators, each once.
  StepMeter(std::vector<const TrafficCounters*> traffic, const OffloadCounters* offload)
      : traffic_(std::move(traffic)), offload_(offload) {}

  // Right after the exchange that ends `step`: what came before it is done, as collectives run in
  // order and pushes are acknowledged, and nothing is on its way. A step is counted from mark to
  // mark, the gathers and pulls of the update before it with it.
  void Mark(uint64_t step);
  // Until the next mark more travels than a step's own.
  void Spoil() { plain_ = false; }

  StepTraffic last() const;

 private:
  StepTraffic Read() const;

  const std::vector<const TrafficCounters*> traffic_;
  const OffloadCounters* const offload_;
  StepTraffic base_;
  bool plain_ = false;
  mutable std::mutex mutex_;
  StepTraffic last_;
};

}  // namespace zeroshard
