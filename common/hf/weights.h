// The weights of a Hugging Face folder as the tensors of a model table: names, transposes and
// packed matrices are translated in both directions by one table (tensor_map.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/parameter_source.h"
#include "common/plan/model_table.h"

namespace zeroshard {

class HfWeights : public ParameterSource {
 public:
  // Maps model.safetensors, or the files that model.safetensors.index.json names; reads headers
  // only. Checks that every tensor of the model is there with its shape and a float type (F32, F16,
  // BF16), and names in `warnings` what the files hold besides and what else is odd about them.
  // INVALID_ARGUMENT lists up to ten tensors that are missing or have another shape; NOT_FOUND
  // names a file.
  static absl::StatusOr<std::unique_ptr<HfWeights>> Open(const std::string& folder,
                                                         const ModelTable& model,
                                                         std::vector<std::string>* warnings);
};

}  // namespace zeroshard
