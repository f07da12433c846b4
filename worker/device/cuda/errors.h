// What the CUDA runtime's errors say to whoever runs a job.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "worker/device/cuda/runtime.h"

namespace zeroshard::cuda {

// Whether the device answers every later call of this process with the same error.
bool IsSticky(Error error);

// OK, or a status that names the call, where it was made, CUDA's name and text of the error and,
// where one is known, a remedy. Codes: RESOURCE_EXHAUSTED out of memory; FAILED_PRECONDITION the
// machine's set-up (driver, GPU, build); INVALID_ARGUMENT a GPU that does not exist; DATA_LOSS
// memory errors of the hardware; INTERNAL the rest.
absl::Status ErrorStatus(Runtime* runtime, Error error, absl::string_view call, const char* file,
                         int line);

}  // namespace zeroshard::cuda
