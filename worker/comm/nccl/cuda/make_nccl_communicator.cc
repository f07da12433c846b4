#include "worker/comm/nccl/cuda/make_nccl_communicator.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/comm/nccl/cuda/cuda_nccl_api.h"
#include "worker/comm/nccl/cuda/fold_kernel.h"
#include "worker/comm/nccl/cuda/nccl_library.h"
#include "worker/comm/nccl/nccl_communicator.h"
#include "worker/device/cuda/make_cuda_device.h"

namespace zeroshard {

absl::Status CheckNccl() { return LoadNccl().status(); }

absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(
    const CommunicatorOptions& options, Rendezvous* rendezvous, Device* device,
    std::shared_ptr<LaunchOrder> order) {
  cuda::CudaDevice* const gpu = cuda::AsCudaDevice(device);
  if (gpu == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("NCCL moves memory of CUDA devices, and the device is ", device->name()));
  }
  ZS_ASSIGN_OR_RETURN(std::shared_ptr<NcclApi> api, MakeCudaNcclApi(gpu));
  ZS_RETURN_IF_ERROR(gpu->MakeCurrent());
  ZS_RETURN_IF_ERROR(ZS_CUDA_CALL(LoadFold()));
  return MakeNcclCommunicator(options, NcclTuning{.order = std::move(order)}, std::move(api),
                              rendezvous, device);
}

}  // namespace zeroshard
