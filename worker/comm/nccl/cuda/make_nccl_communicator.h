// Collectives between GPUs. Only where CUDA is built (ZEROSHARD_HAS_CUDA): zeroshard_comm_nccl.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/comm/nccl/launch_order.h"
#include "worker/device/device.h"

namespace zeroshard {

// Whether this host has the library, which is loaded and stays so: FAILED_PRECONDITION with what is
// missing and what to do. No GPU is needed.
absl::Status CheckNccl();

// Over NCCL, on a CUDA device (INVALID_ARGUMENT on another), which must outlive the communicator.
// Every rank needs a GPU of its own: workers that share one take StagedCommunicator over Gloo.
// Connects before it returns, with the errors of CheckNccl and ConnectNccl (../nccl_connect.h).
// options.host is not looked at: NCCL_SOCKET_IFNAME names the interface. Where work on the GPU
// cannot be aborted within ten seconds the process ends with kExitFailed. All communicators of one
// GPU need one `order`; null where there is but this one.
absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(
    const CommunicatorOptions& options, Rendezvous* rendezvous, Device* device,
    std::shared_ptr<LaunchOrder> order = nullptr);

}  // namespace zeroshard
