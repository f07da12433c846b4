#include "worker/device/cuda/errors.h"

#include "absl/strings/str_cat.h"

namespace zeroshard::cuda {
namespace {

struct Advice {
  absl::StatusCode code = absl::StatusCode::kInternal;
  const char* remedy = "";
};

Advice AdviceFor(Error error) {
  using Code = absl::StatusCode;
  switch (error) {
    case Error::kOutOfMemory:
      return {Code::kResourceExhausted,
              "use more workers, a higher ZeRO stage, a smaller micro-batch or activation "
              "checkpointing, and see in nvidia-smi who else uses the GPU"};
    case Error::kInsufficientDriver:
      return {Code::kFailedPrecondition,
              "no NVIDIA driver is loaded, or it is older than this program's CUDA: install or "
              "update it (nvidia-smi names it; a container needs --gpus), or use --device cpu"};
    case Error::kStubLibrary:
      return {Code::kFailedPrecondition,
              "the stub libcuda.so of the CUDA toolkit was loaded instead of the driver's: take "
              "its folder (.../lib64/stubs) out of LD_LIBRARY_PATH"};
    case Error::kNoDevice:
      return {Code::kFailedPrecondition,
              "the driver is there but shows no GPU: look at nvidia-smi, CUDA_VISIBLE_DEVICES and "
              "the container's --gpus, or use --device cpu"};
    case Error::kInvalidDevice:
      return {Code::kInvalidArgument, "nvidia-smi -L lists the GPUs"};
    case Error::kInitialization:
    case Error::kOperatingSystem:
    case Error::kSystemNotReady:
      return {Code::kFailedPrecondition,
              "the driver did not start: see dmesg for NVRM or Xid lines; HGX machines need the "
              "service nvidia-fabricmanager"};
    case Error::kSystemDriverMismatch:
      return {Code::kFailedPrecondition,
              "the driver's libraries and its kernel module differ in version: reboot, or mount "
              "the host's libraries into the container"};
    case Error::kDevicesUnavailable:
      return {Code::kFailedPrecondition,
              "the GPU is in exclusive mode and another process has it, or its mode forbids "
              "computing: one worker a GPU, or nvidia-smi -c 0"};
    case Error::kNoKernelImage:
      return {Code::kFailedPrecondition,
              "this program was built for other GPUs: rebuild with CMAKE_CUDA_ARCHITECTURES"};
    case Error::kIllegalAddress:
    case Error::kMisalignedAddress:
    case Error::kInvalidAddressSpace:
    case Error::kAssert:
    case Error::kHardwareStack:
    case Error::kIllegalInstruction:
    case Error::kInvalidPc:
    case Error::kLaunchFailure:
    case Error::kTensorMemoryLeak:
      return {Code::kInternal,
              "an earlier kernel or copy of this process went wrong: run the worker under "
              "compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1, to see which"};
    case Error::kEccUncorrectable:
    case Error::kNvlinkUncorrectable:
    case Error::kContained:
      return {Code::kDataLoss,
              "the hardware failed (dmesg has its Xid): drain the host, reset the GPU and run "
              "dcgmi diag before it is used again"};
    case Error::kLaunchTimeout:
      return {Code::kInternal, "a display's watchdog ended a kernel: use a GPU without a display"};
    case Error::kExternalDevice:
      return {Code::kDataLoss, "a device on the bus failed: see dmesg"};
    case Error::kMpsClientTerminated:
      return {Code::kInternal, "the MPS server ended this client: see its log"};
    default:
      return {};
  }
}

}  // namespace

bool IsSticky(Error error) {
  switch (error) {
    case Error::kEccUncorrectable:
    case Error::kNvlinkUncorrectable:
    case Error::kContained:
    case Error::kIllegalAddress:
    case Error::kLaunchTimeout:
    case Error::kAssert:
    case Error::kHardwareStack:
    case Error::kIllegalInstruction:
    case Error::kMisalignedAddress:
    case Error::kInvalidAddressSpace:
    case Error::kInvalidPc:
    case Error::kLaunchFailure:
    case Error::kTensorMemoryLeak:
    case Error::kMpsClientTerminated:
    case Error::kExternalDevice:
    case Error::kUnknown:
      return true;
    default:
      return false;
  }
}

absl::Status ErrorStatus(Runtime* runtime, Error error, absl::string_view call, const char* file,
                         int line) {
  if (error == Error::kOk) return absl::OkStatus();
  const Advice advice = AdviceFor(error);
  std::string text = absl::StrCat("CUDA: ", call, " at ", file, ":", line, ": ",
                                  runtime->ErrorName(error), " (", runtime->ErrorText(error), ")");
  if (advice.remedy[0] != '\0') absl::StrAppend(&text, "; ", advice.remedy);
  return absl::Status(advice.code, text);
}

}  // namespace zeroshard::cuda
