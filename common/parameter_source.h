// Where the values of a model's tensors come from: a Hugging Face folder, a checkpoint.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "common/plan/model_table.h"

namespace zeroshard {

class ParameterSource {
 public:
  virtual ~ParameterSource() = default;
  // fp32 values of elements [begin, end) of one tensor, counted row by row in the shape the model
  // table gives it. Thread-safe. Errors name the file and the tensor; a source that was opened for
  // this model has every tensor.
  virtual absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                            float* out) const = 0;
  // Says that what was read so far is not needed soon: mapped pages leave resident memory.
  virtual void DropPages() const {}
};

}  // namespace zeroshard
