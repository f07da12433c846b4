// Full tensors and the rows that a tensor rank has of them, in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/plan/model_table.h"
#include "common/plan/tensor_slices.h"
#include "worker/comm/communicator.h"

namespace zeroshard {

// A tensor by its places in a model's table.
struct TensorPlace {
  size_t unit = 0, parameter = 0;
  const ParameterInfo& In(const ModelTable& model) const {
    return model.units[unit].parameters[parameter];
  }
};

// Empty where the model has none of that name.
std::optional<TensorPlace> FindTensor(const ModelTable& model, const std::string& name);

// Collective over a tensor line: the full tensor, of which this rank has the part `own`. The
// collective's errors.
absl::StatusOr<std::vector<float>> JoinSlices(const ModelTable& full, const TensorPlace& place,
                                              absl::Span<const float> own, Communicator* line,
                                              uint64_t step);

}  // namespace zeroshard
