// How an optimizer changes a run of elements: the seam between chunks and formulas. Which one a job
// has, and with which numbers, its specification says.
#pragma once

#include <cstdint>
#include <memory>

#include "common/types.h"
#include "zeroshard/v1/job.pb.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::store {

// Elements of one tensor that are updated together; all pointers are to the first of them.
struct UpdateRange {
  int64_t size = 0;
  int unit = 0;  // whose flat vector they lie in, from element `first` on
  int64_t first = 0;
  bool decay = false;  // the tensor is of the group whose weights decay
  const void* gradient = nullptr;
  DType gradient_type = DType::kF32;
  float* master = nullptr;
  float* exp_avg = nullptr;     // SGD: the momentum
  float* exp_avg_sq = nullptr;  // null where the optimizer keeps none
  void* parameters = nullptr;   // may be `master` where its type is fp32
  DType parameter_type = DType::kF32;
};

// One decided step. Thread-safe; bits depend on neither the split into ranges nor the threads.
class OptimizerStep {
 public:
  virtual ~OptimizerStep() = default;
  virtual void Update(const UpdateRange& range) const = 0;
};

// Of a normalised specification and a decision that is no skip.
std::unique_ptr<const OptimizerStep> MakeOptimizerStep(const v1::JobSpec& spec,
                                                       const v1::StepDecision& decision);

}  // namespace zeroshard::store
