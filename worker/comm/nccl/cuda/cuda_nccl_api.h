// NcclApi over NCCL and a CUDA device.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/comm/nccl/nccl_api.h"
#include "worker/device/cuda/cuda_device.h"

namespace zeroshard {

// `device` outlives the streams that are made; events may outlive it. The errors of LoadNccl.
absl::StatusOr<std::shared_ptr<NcclApi>> MakeCudaNcclApi(cuda::CudaDevice* device);

}  // namespace zeroshard
