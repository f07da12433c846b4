// A whole model in the memory of a device.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/parameter_source.h"
#include "common/plan/model_table.h"
#include "worker/device/device.h"
#include "worker/generate/parameter_lender.h"

namespace zeroshard {

class MemoryParameters : public ParameterLender {
 public:
  // Reads every tensor of `model`, rounded once to `dtype`. `device` outlives the answer. The
  // source's errors; RESOURCE_EXHAUSTED names the bytes.
  static absl::StatusOr<std::unique_ptr<MemoryParameters>> Load(const ModelTable& model,
                                                                const ParameterSource& source,
                                                                Device* device, DType dtype);

  absl::StatusOr<LentParameters> Borrow(int unit) override;
  absl::Status GiveBack(int unit) override { return absl::OkStatus(); }

 private:
  std::vector<Buffer> units_;
  const void* lm_head_ = nullptr;
};

}  // namespace zeroshard
