#include "worker/agent/cuda_backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/comm/nccl/cuda/make_nccl_communicator.h"
#include "worker/comm/staged_communicator.h"
#include "worker/device/cuda/make_cuda_device.h"
#include "worker/ops/cuda/cublas_lt.h"
#include "worker/ops/cuda/cuda_ops.h"

namespace zeroshard {
namespace {

absl::StatusOr<std::unique_ptr<Communicator>> MakeStagedGloo(const CommunicatorOptions& options,
                                                             Rendezvous* rendezvous,
                                                             Device* device) {
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> gloo,
                      MakeGlooCommunicator(options, rendezvous, device));
  return MakeStagedCommunicator(std::move(gloo), device);
}

// What this host has not is an option that it cannot serve.
absl::Status Refused(const absl::Status& status) {
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat("--device cuda: ", status.message()));
}

}  // namespace

absl::StatusOr<WorkerBackend> CudaBackend(WorkerBackend common, int ordinal,
                                          Collectives collectives) {
  ZS_RETURN_IF_ERROR(Refused(CheckCudaDevice(ordinal)));
  ZS_ASSIGN_OR_RETURN(common.device_memory, CudaMemoryBytes(ordinal));
  ZS_RETURN_IF_ERROR(Refused(cuda::LoadCublasLt().status()));
  if (collectives == Collectives::kNccl) ZS_RETURN_IF_ERROR(Refused(CheckNccl()));
  common.make_device = [ordinal] { return MakeCudaDevice(ordinal); };
  common.make_ops = [](Device* device, const OpsOptions& options) {
    return MakeCudaOps(device, options.tf32);
  };
  if (collectives == Collectives::kGloo) {
    common.make_communicator = MakeStagedGloo;
  } else {
    common.make_communicator = [order = std::make_shared<LaunchOrder>()](
                                   const CommunicatorOptions& options, Rendezvous* rendezvous,
                                   Device* device) {
      return MakeNcclCommunicator(options, rendezvous, device, order);
    };
  }
  return common;
}

}  // namespace zeroshard
