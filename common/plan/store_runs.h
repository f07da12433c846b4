// Where the elements of a tensor rank's units lie in the whole model's, which is what the shard
// stores' chunks are made of (chunk_table.h): chunks know no mesh, so none of them moves where a
// mesh changes, and any mesh continues on the state of any other. Pure arithmetic; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "common/plan/tensor_slices.h"

namespace zeroshard {

// Consecutive elements of one tensor. They begin and end anywhere: rows of a vocabulary and biases
// by heads are no multiples of 64.
struct StoreRun {
  int64_t local = 0;  // from the start of the rank's unit
  int64_t full = 0;   // from the start of the whole model's
  int64_t size = 0;
  bool home = true;     // the stores get their gradient from this rank
  int64_t padding = 0;  // elements behind them in the whole unit that are no tensor's
};

// What a range of a local unit is of the whole model's unit, ascending; what is no tensor's here
// (between tensors, rows behind the vocabulary's end) is in none. `slice` is of `full`, or of a
// part of it where units lack tensors (stage_model.h). `local` must lie within the unit.
//
// Stores commit a step when each element of a chunk was pushed exactly once. The homes' runs over
// all ranks of a tensor group, whatever pieces their units are cut into, are each tensor's elements
// once, and the paddings behind them the rest of the units: whoever is home of a tensor's last
// element pushes zeros for the padding behind it, too.
std::vector<StoreRun> StoreRuns(const ModelTable& full, const TensorRank& slice, size_t unit,
                                ElementRange local);

// Elements that the stores get from the rank, and give it, for a range.
int64_t PushedElements(const std::vector<StoreRun>& runs);
int64_t PulledElements(const std::vector<StoreRun>& runs);

}  // namespace zeroshard
