// Initial values of parameters, from a counter-based generator: any rank or store draws any range.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "common/parameter_source.h"

namespace zeroshard {

// Initial values (architecture, section 4): a counter-based generator keyed by seed, tensor name
// and element index, so that any rank can fill any range. Writes elements [begin, end) of the
// tensor.
void InitNormal(uint64_t seed, const std::string& tensor, int64_t begin, int64_t end, float std,
                float* out);

// Initial values as the model table has them (ParameterInfo::init). Thread-safe.
class FreshWeights : public ParameterSource {
 public:
  explicit FreshWeights(uint64_t seed) : seed_(seed) {}
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override;

 private:
  const uint64_t seed_;
};

}  // namespace zeroshard
