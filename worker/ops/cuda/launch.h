// Launching kernels from host code: errors as absl::Status, and from a DType to an element type.
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/types.h"
#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

// OK, or the INTERNAL error of a call or of the launch just made (RESOURCE_EXHAUSTED without device
// memory), with the line that asked. An error of work that was enqueued earlier may also show up
// here; the text says so.
absl::Status StatusOf(cudaError_t error, const char* what,
                      std::source_location where = std::source_location::current());

// Of the launch just made by this thread.
inline absl::Status LaunchStatus(const char* kernel,
                                 std::source_location where = std::source_location::current()) {
  return StatusOf(cudaGetLastError(), kernel, where);
}

// Names an element type to a generic lambda: `using T = typename decltype(type)::Type`.
template <class T>
struct TypeTag {
  using Type = T;
};

// Calls f(TypeTag<T>()) for the element type of `dtype`; INVALID_ARGUMENT where there is none.
template <class F>
absl::Status ForType(DType dtype, const char* what, const F& f) {
  if (IsFloat(dtype)) {
    return WithElement(dtype, [&](auto element) { return f(TypeTag<decltype(element)>()); });
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": element type ", NameOf(dtype), "; wanted fp32, bf16 or fp16"));
}

}  // namespace zeroshard::cuda
