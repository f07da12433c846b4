#include "worker/agent/backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

// What does not depend on the device.
WorkerBackend CommonBackend(int threads) {
  WorkerBackend backend;
  backend.threads = threads;
  backend.open_data = TokenDataset::Open;
  backend.open_store =
      [](StoreClientOptions options) -> absl::StatusOr<std::unique_ptr<StateStore>> {
    return StoreClient::Open(std::move(options));
  };
  backend.make_trainer = Trainer::Create;
  return backend;
}

WorkerBackend CpuBackend(int threads) {
  WorkerBackend backend = CommonBackend(threads);
  backend.make_device = [] { return MakeCpuDevice(); };
  backend.make_ops = [threads](Device*) { return MakeCpuOps(threads); };
  backend.make_communicator = [](const CommunicatorOptions& options, Rendezvous* rendezvous,
                                 Device* device) {
    return MakeGlooCommunicator(options, rendezvous, device);
  };
  return backend;
}

absl::StatusOr<WorkerBackend> DeviceBackend(const std::string& device, int threads) {
  if (device == "cpu") return CpuBackend(threads);
  if (device == "cuda") {
    return absl::InvalidArgumentError(
        "--device cuda: this program was built without CUDA; use --device cpu");
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--device is \"", device, "\"; wanted cpu or cuda"));
}

}  // namespace

absl::StatusOr<WorkerBackend> MakeBackend(const std::string& name, int threads) {
  ZS_ASSIGN_OR_RETURN(WorkerBackend backend, DeviceBackend(name, threads));
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, backend.make_device());
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<Ops> ops, backend.make_ops(device.get()));
  backend.fingerprint = ops->Fingerprint();
  return backend;
}

}  // namespace zeroshard
