#include "worker/device/cuda/cuda_device.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/device/cuda/errors.h"
#include "worker/device/cuda/lap_timer.h"

namespace zeroshard::cuda {
namespace {

// bf16 products and asynchronous copies to shared memory, on which the kernels are built.
constexpr int kLeastMajor = 8;

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

absl::Status NoDevices(Runtime* runtime, Error error, int ordinal) {
  const absl::Status status = ErrorStatus(runtime, error, "cudaGetDeviceCount", __FILE__, __LINE__);
  int driver = 0, built = 0;
  std::string versions;
  if (runtime->DriverVersion(&driver) == Error::kOk && driver > 0 &&
      runtime->RuntimeVersion(&built) == Error::kOk) {
    versions = absl::StrCat(" (the driver is for CUDA ", VersionText(driver), ", this program for ",
                            VersionText(built), ")");
  }
  return absl::Status(status.code(), absl::StrCat("cuda:", ordinal, ": no usable GPU", versions,
                                                  ": ", status.message()));
}

absl::Status NoSuchDevice(int ordinal, int count) {
  const std::string there =
      count == 1 ? "one GPU, cuda:0" : absl::StrCat(count, " GPUs, cuda:0 to cuda:", count - 1);
  return absl::InvalidArgumentError(absl::StrCat(
      "cuda:", ordinal, ": this process sees ", there,
      "; nvidia-smi -L lists them, CUDA_VISIBLE_DEVICES and a container may hide some"));
}

}  // namespace

absl::StatusOr<DeviceProperties> ProbeDevice(Runtime* runtime, int ordinal) {
  int count = 0;
  Error error = runtime->DeviceCount(&count);
  if (error == Error::kOk && count == 0) error = Error::kNoDevice;
  if (error != Error::kOk) return NoDevices(runtime, error, ordinal);
  if (ordinal < 0 || ordinal >= count) return NoSuchDevice(ordinal, count);
  DeviceProperties found;
  error = runtime->Properties(ordinal, &found);
  if (error != Error::kOk) {
    return ErrorStatus(runtime, error, "cudaGetDeviceProperties", __FILE__, __LINE__);
  }
  if (found.major < kLeastMajor) {
    return absl::FailedPreconditionError(
        absl::StrCat("cuda:", ordinal, " is a ", found.name, " of compute capability ", found.major,
                     ".", found.minor, "; wanted ", kLeastMajor,
                     ".0 (A100) or later. Use another GPU, or --device cpu"));
  }
  if (!found.memory_pools) {
    return absl::FailedPreconditionError(
        absl::StrCat("cuda:", ordinal, " (", found.name,
                     ") cannot allocate in stream order (cudaDevAttrMemoryPoolsSupported is 0), as "
                     "some virtual GPUs; use a whole GPU or a MIG slice, or --device cpu"));
  }
  return found;
}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(Runtime* runtime, int ordinal) {
  ZS_ASSIGN_OR_RETURN(DeviceProperties properties, ProbeDevice(runtime, ordinal));
  auto device = std::unique_ptr<CudaDevice>(new CudaDevice());
  device->context_ = std::make_shared<Context>(runtime, ordinal, std::move(properties));
  ZS_RETURN_IF_ERROR(device->context_->Enter());
  device->compute_ =
      std::make_shared<CudaStream>(device->context_, "compute", false, HostEvents::kBlock);
  ZS_ASSIGN_OR_RETURN(device->memory_, DeviceMemory::Create(device->context_, device->compute_));
  device->pinned_ = std::make_shared<PinnedMemory>(device->context_);
  return device;
}

std::unique_ptr<LapTimer> CudaDevice::NewLapTimer() {
  const absl::StatusOr<StreamHandle> stream = compute_->handle();
  if (!stream.ok()) return nullptr;  // nothing can be enqueued on such a device
  return std::make_unique<CudaLapTimer>(context_, *stream);
}

}  // namespace zeroshard::cuda
