// Memory of a device that work in one stream's order shares: what an operation leaves there, the
// next may write over.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/status_macros.h"
#include "common/types.h"
#include "worker/device/device.h"

namespace zeroshard::cuda {

// Grows to the most that was asked for, in whole MiB, and never shrinks. Frees in the order of the
// device's compute stream, so work that is under way there keeps what it was given. Not
// thread-safe.
class Scratch {
 public:
  explicit Scratch(Device* device) : device_(device) {}

  // At least `bytes`, 256-byte aligned, with any contents; good until the next call. The device's
  // RESOURCE_EXHAUSTED.
  absl::StatusOr<void*> Get(int64_t bytes) {
    if (bytes > static_cast<int64_t>(buffer_.bytes())) {
      buffer_ = Buffer();  // first, so that both need not fit
      const auto wanted = static_cast<size_t>(RoundUp(bytes, int64_t{1} << 20));
      ZS_ASSIGN_OR_RETURN(buffer_, device_->Allocate(wanted, MemoryKind::kBuffers));
    }
    return buffer_.data();
  }

 private:
  Device* const device_;
  Buffer buffer_;
};

}  // namespace zeroshard::cuda
