#include "worker/agent/backend.h"

#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "worker/agent/cuda_backend.h"

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
  backend.make_ops = [threads](Device*, const OpsOptions& options) {
    if (options.tf32) LogInfo("tf32: true is for GPUs: --device cpu multiplies in full fp32");
    return MakeCpuOps(threads);
  };
  backend.make_communicator = [](const CommunicatorOptions& options, Rendezvous* rendezvous,
                                 Device* device) {
    return MakeGlooCommunicator(options, rendezvous, device);
  };
  return backend;
}

// N of "cuda:N"; 0 of "cuda"; nothing of anything else.
std::optional<int> CudaOrdinal(absl::string_view device) {
  if (!absl::ConsumePrefix(&device, "cuda")) return std::nullopt;
  if (device.empty()) return 0;
  int ordinal = 0;
  if (!absl::ConsumePrefix(&device, ":") || device.empty() || !absl::ascii_isdigit(device[0]) ||
      !absl::SimpleAtoi(device, &ordinal)) {
    return std::nullopt;
  }
  return ordinal;
}

absl::StatusOr<WorkerBackend> DeviceBackend(const std::string& device, int threads,
                                            const std::string& collectives) {
  if (!collectives.empty() && collectives != "nccl" && collectives != "gloo") {
    return absl::InvalidArgumentError(
        absl::StrCat("--collectives is \"", collectives, "\"; wanted nccl or gloo"));
  }
  if (device == "cpu") {
    if (collectives == "nccl") {
      return absl::InvalidArgumentError("--collectives nccl takes --device cuda; wanted gloo");
    }
    return CpuBackend(threads);
  }
  if (const std::optional<int> ordinal = CudaOrdinal(device)) {
    return CudaBackend(CommonBackend(threads), *ordinal,
                       collectives == "gloo" ? Collectives::kGloo : Collectives::kNccl);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--device is \"", device, "\"; wanted cpu, cuda or cuda:N"));
}

}  // namespace

absl::StatusOr<WorkerBackend> MakeBackend(const std::string& name, int threads,
                                          const std::string& collectives) {
  ZS_ASSIGN_OR_RETURN(WorkerBackend backend, DeviceBackend(name, threads, collectives));
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, backend.make_device());
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<Ops> ops, backend.make_ops(device.get(), {}));
  backend.fingerprint = ops->Fingerprint();
  return backend;
}

}  // namespace zeroshard
