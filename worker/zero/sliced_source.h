// Values of full tensors as one tensor rank's slice holds them: what fills a model from fresh
// values, a model folder or a checkpoint fills a slice of it through this, whatever the mesh was
// that wrote the checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"
#include "common/parameter_source.h"
#include "common/plan/tensor_slices.h"

namespace zeroshard {

class SlicedSource : public ParameterSource {
 public:
  // All outlive it. `slice`: of the model `full`; `values` has the tensors of `full`.
  SlicedSource(const ModelTable* full, const TensorRank* slice, const ParameterSource* values);

  // Of a tensor of slice->model, in its local shape; rows behind the vocabulary's end are zeros.
  // Also the errors of `values`; INVALID_ARGUMENT for a tensor that the slice has not in this
  // shape.
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override;
  void DropPages() const override { values_.DropPages(); }

 private:
  struct Place {
    size_t unit = 0;
    int parameter = 0;
  };
  const ModelTable& full_;
  const TensorRank& slice_;
  const ParameterSource& values_;
  std::unordered_map<std::string, Place> places_;
};

}  // namespace zeroshard
