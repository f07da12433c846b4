#include "common/plan/pipeline_order.h"

#include <algorithm>

namespace zeroshard {
namespace {

// The i-th forward (backward) of a rank with v > 1: p micro-batches in its first (last) virtual
// stage, the same ones in the next, and so on; then the next p micro-batches.
Compute Interleaved(const PipelineShape& s, int rank, bool backward, int64_t i) {
  const int64_t round = i / s.VirtualStages();
  const int64_t in_round = i % s.VirtualStages();
  const int turn = static_cast<int>(in_round / s.stages);
  const int run = backward ? s.virtual_stages - 1 - turn : turn;
  return {.backward = backward,
          .virtual_stage = rank + s.stages * run,
          .micro_batch = round * s.stages + in_round % s.stages};
}

Compute Nth(const PipelineShape& s, int rank, bool backward, int64_t i) {
  if (s.virtual_stages > 1) return Interleaved(s, rank, backward, i);
  return {.backward = backward, .virtual_stage = rank, .micro_batch = i};
}

// How many turns a rank has with micro-batches up to the next multiple of p.
int64_t Turns(const PipelineShape& s) {
  const int64_t p = s.stages, v = s.virtual_stages;
  return v > 1 ? (s.micro_batches + p - 1) / p * p * v : s.micro_batches;
}

std::vector<Compute> ForwardsOf(const PipelineShape& s, int rank) {
  std::vector<Compute> computes;
  for (int64_t i = 0; i < Turns(s); ++i) {
    const Compute compute = Nth(s, rank, false, i);
    if (compute.micro_batch < s.micro_batches) computes.push_back(compute);
  }
  return computes;
}

// Some forwards to fill the pipeline, then one forward and one backward in turn, then the backwards
// that are left.
std::vector<Compute> OrderOf(const PipelineShape& s, int rank) {
  const bool interleaved = s.virtual_stages > 1;
  const int64_t p = s.stages, v = s.virtual_stages;
  const int64_t fill = interleaved ? 2 * (p - rank - 1) + (v - 1) * p : p - rank - 1;
  const int64_t count = Turns(s);
  const int64_t ahead = std::min(fill, count);
  std::vector<Compute> computes;
  const auto add = [&](bool backward, int64_t i) {
    const Compute compute = Nth(s, rank, backward, i);
    if (compute.micro_batch < s.micro_batches) computes.push_back(compute);
  };
  for (int64_t i = 0; i < ahead; ++i) add(false, i);
  for (int64_t i = 0; i < count; ++i) {
    if (ahead + i < count) add(false, ahead + i);
    add(true, i);
  }
  return computes;
}

class Clock {
 public:
  Clock(const PipelineShape& shape, const std::vector<StageTime>& times)
      : shape_(shape),
        times_(times),
        ends_(static_cast<size_t>(2 * shape.VirtualStages() * shape.micro_batches), kUnknown) {}

  std::vector<std::vector<Compute>> Run(std::vector<Compute> (*order)(const PipelineShape&, int)) {
    std::vector<std::vector<Compute>> ranks;
    for (int rank = 0; rank < shape_.stages; ++rank) ranks.push_back(order(shape_, rank));
    std::vector<size_t> next(ranks.size(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < ranks.size(); ++rank)
        moved |= Advance(&ranks[rank], &next[rank]);
    }
    return ranks;
  }

 private:
  static constexpr double kUnknown = -1;

  // As far as inputs are there.
  bool Advance(std::vector<Compute>* computes, size_t* next) {
    const size_t first = *next;
    for (size_t& i = *next; i < computes->size(); ++i) {
      Compute& c = (*computes)[i];
      const double ready = ReadyAt(c);
      if (ready == kUnknown) break;
      const StageTime& time = times_[static_cast<size_t>(c.virtual_stage)];
      c.begin = std::max(i == 0 ? 0 : (*computes)[i - 1].end, ready);
      c.end = c.begin + (c.backward ? time.backward : time.forward);
      EndOf(c.backward, c.virtual_stage, c.micro_batch) = c.end;
    }
    return *next > first;
  }

  double ReadyAt(const Compute& c) {
    if (!c.backward)
      return c.virtual_stage == 0 ? 0 : EndOf(false, c.virtual_stage - 1, c.micro_batch);
    // Its own forward is done where the next stage's is, and on the last stage was before it.
    if (c.virtual_stage + 1 == shape_.VirtualStages())
      return EndOf(false, c.virtual_stage, c.micro_batch);
    return EndOf(true, c.virtual_stage + 1, c.micro_batch);
  }

  double& EndOf(bool backward, int virtual_stage, int64_t micro_batch) {
    const int64_t row = (backward ? shape_.VirtualStages() : 0) + virtual_stage;
    return ends_[static_cast<size_t>(row * shape_.micro_batches + micro_batch)];
  }

  const PipelineShape& shape_;
  const std::vector<StageTime>& times_;
  std::vector<double> ends_;  // of each forward, then of each backward
};

}  // namespace

std::vector<std::vector<Compute>> RunOrder(const PipelineShape& shape,
                                           const std::vector<StageTime>& times) {
  return Clock(shape, times).Run(&OrderOf);
}

std::vector<std::vector<Compute>> RunForwards(const PipelineShape& shape,
                                              const std::vector<StageTime>& times) {
  return Clock(shape, times).Run(&ForwardsOf);
}

}  // namespace zeroshard
