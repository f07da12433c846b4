// In which order each rank of a pipeline computes. Pure; thread-safe.
//
// With v = 1 it is 1F1B (Narayanan et al. 2021, section 2.2.1), with v > 1 interleaved 1F1B
// (section 2.2.2). Where p does not divide the m micro-batches, the interleaved order is that of
// the next multiple without the micro-batches that do not exist: leaving some out of an order that
// works leaves one that works. 1F1B needs no such rule.
#pragma once

#include <cstdint>
#include <vector>

namespace zeroshard {

struct PipelineShape {
  int stages = 1;             // p
  int virtual_stages = 1;     // v, of each rank
  int64_t micro_batches = 1;  // m, of one data-parallel rank and step
  int VirtualStages() const { return stages * virtual_stages; }
  friend bool operator==(const PipelineShape&, const PipelineShape&) = default;
};

// Of one virtual stage and micro-batch, in any one unit.
struct StageTime {
  double forward = 1, backward = 2;
};

struct Compute {
  bool backward = false;
  int virtual_stage = 0;
  int64_t micro_batch = 0;
  double begin = 0, end = 0;
};

// By rank: its computes in order, and when each begins and ends if they wait for their rank and
// their inputs alone, and those take no time to arrive. `times` by virtual stage. Sizes at least 1;
// memory for 2 p v m of them.
std::vector<std::vector<Compute>> RunOrder(const PipelineShape& shape,
                                           const std::vector<StageTime>& times);

// The same of forwards alone, as an evaluation has them: with v > 1 p micro-batches in a rank's
// first virtual stage, the same ones in its next, and so on; then the next p.
std::vector<std::vector<Compute>> RunForwards(const PipelineShape& shape,
                                              const std::vector<StageTime>& times);

}  // namespace zeroshard
