// A GPU of NVIDIA's as a Device: memory from a pool of its own, its streams are CUDA streams.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/device/cuda/context.h"
#include "worker/device/cuda/memory.h"
#include "worker/device/cuda/nvtx_range.h"
#include "worker/device/cuda/stream.h"
#include "worker/device/device.h"

namespace zeroshard::cuda {

// Thread-safe. Its buffers, streams and events must be gone, and its work done, before it is;
// buffers and events that are late keep what they need.
class CudaDevice : public Device {
 public:
  // As ProbeDevice, and the errors of making a context on the GPU. `runtime` outlives the device.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(Runtime* runtime, int ordinal);

  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override {
    return memory_->Allocate(bytes, kind);
  }
  absl::StatusOr<Buffer> AllocateHost(size_t bytes) override { return pinned_->Allocate(bytes); }
  // Its Copy and WaitFor block the caller where an event of the host is not done yet; other
  // streams' do not.
  CudaStream* compute() override { return compute_.get(); }
  std::unique_ptr<Stream> NewStream(const std::string& name) override {
    return NewCudaStream(name);
  }
  std::unique_ptr<CudaStream> NewCudaStream(const std::string& name) {
    return std::make_unique<CudaStream>(context_, name, true, HostEvents::kDefer);
  }
  bool is_host() const override { return false; }
  const MemoryAccounting& memory() const override { return memory_->accounting(); }
  std::string name() const override { return context_->name(); }
  absl::Status Broken() const override { return context_->Broken(); }
  std::unique_ptr<LapTimer> NewLapTimer() override;
  // NVTX's.
  void BeginRange(const std::string& name) override { BeginNvtxRange(name.c_str()); }
  void EndRange() override { EndNvtxRange(); }

  // Makes the GPU the calling thread's, which kernels are launched on: once a thread.
  absl::Status MakeCurrent() { return context_->Enter(); }
  const DeviceProperties& properties() const { return context_->properties(); }
  int ordinal() const { return context_->ordinal(); }
  // For events of work that other code enqueues (RecordOn of event.h).
  const std::shared_ptr<Context>& context() const { return context_; }

 private:
  CudaDevice() = default;

  std::shared_ptr<Context> context_;
  std::shared_ptr<CudaStream> compute_;
  std::shared_ptr<DeviceMemory> memory_;
  std::shared_ptr<PinnedMemory> pinned_;
};

// Null where the device is another's.
inline CudaDevice* AsCudaDevice(Device* device) { return dynamic_cast<CudaDevice*>(device); }

// What GPU `ordinal` is, without touching it. FAILED_PRECONDITION: no driver, or one that is too
// old for this program; no GPU; one that is too old (compute capability below 8.0) or cannot
// allocate in stream order. INVALID_ARGUMENT: no GPU of this number, and which there are.
absl::StatusOr<DeviceProperties> ProbeDevice(Runtime* runtime, int ordinal);

}  // namespace zeroshard::cuda
