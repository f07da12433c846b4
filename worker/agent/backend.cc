#include "worker/agent/backend.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard {

absl::StatusOr<WorkerBackend> MakeBackend(const std::string& device, int threads) {
  if (device == "cuda") {
    return absl::InvalidArgumentError(
        "--device cuda: this program was built without CUDA; use --device cpu");
  }
  if (device != "cpu") {
    return absl::InvalidArgumentError(
        absl::StrCat("--device is \"", device, "\"; wanted cpu or cuda"));
  }
  WorkerBackend backend;
  backend.threads = threads;
  backend.open_data = TokenDataset::Open;
  backend.make_device = MakeCpuDevice;
  backend.make_ops = [threads] { return MakeCpuOps(threads); };
  backend.make_communicator = [](const CommunicatorOptions& options, Rendezvous* rendezvous,
                                 Device* device) {
    return MakeGlooCommunicator(options, rendezvous, device);
  };
  backend.open_store =
      [](StoreClientOptions options) -> absl::StatusOr<std::unique_ptr<StateStore>> {
    return StoreClient::Open(std::move(options));
  };
  backend.make_trainer = Trainer::Create;
  return backend;
}

}  // namespace zeroshard
