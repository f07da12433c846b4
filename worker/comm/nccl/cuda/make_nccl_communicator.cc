#include "worker/comm/nccl/cuda/make_nccl_communicator.h"

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/comm/nccl/cuda/cuda_nccl_api.h"
#include "worker/comm/nccl/nccl_communicator.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(
    const CommunicatorOptions& options, Rendezvous* rendezvous, Device* device) {
  cuda::CudaDevice* const gpu = cuda::AsCudaDevice(device);
  if (gpu == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("NCCL moves memory of CUDA devices, and the device is ", device->name()));
  }
  ZS_RETURN_IF_ERROR(gpu->MakeCurrent());
  return MakeNcclCommunicator(options, NcclTuning{}, MakeCudaNcclApi(gpu), rendezvous, device);
}

}  // namespace zeroshard
