#include <memory>
#include <string>
#include <utility>

#include "worker/device/cpu_memory.h"
#include "worker/device/device.h"
#include "worker/device/host_stream.h"

namespace zeroshard {

const char* NameOf(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kParameters:
      return "parameters";
    case MemoryKind::kGradients:
      return "gradients";
    case MemoryKind::kOptimizer:
      return "optimizer";
    case MemoryKind::kActivations:
      return "activations";
    case MemoryKind::kBuffers:
      return "buffers";
  }
  return "?";
}

Buffer::Buffer(void* data, size_t bytes, std::function<void()> free)
    : data_(data), bytes_(bytes), free_(std::move(free)) {}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      free_(std::exchange(other.free_, nullptr)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  if (free_) free_();
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  free_ = std::exchange(other.free_, nullptr);
  return *this;
}

Buffer::~Buffer() {
  if (free_) free_();
}

namespace {

class CpuDevice : public Device {
 public:
  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override {
    return cpu::AllocateHost(bytes, kind, accounting_);
  }
  absl::StatusOr<Buffer> AllocateHost(size_t bytes) override {
    return Allocate(bytes, MemoryKind::kBuffers);
  }
  Stream* compute() override { return compute_.get(); }
  std::unique_ptr<Stream> NewStream(const std::string& name) override {
    return MakeHostStream(name);
  }
  bool is_host() const override { return true; }
  const MemoryAccounting& memory() const override { return *accounting_; }
  std::string name() const override { return "cpu"; }

 private:
  std::shared_ptr<cpu::AtomicAccounting> accounting_ = std::make_shared<cpu::AtomicAccounting>();
  const std::unique_ptr<Stream> compute_ = MakeInlineStream();
};

}  // namespace

std::unique_ptr<Device> MakeCpuDevice() { return std::make_unique<CpuDevice>(); }

}  // namespace zeroshard
