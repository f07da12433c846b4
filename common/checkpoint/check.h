// For this library alone.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "common/checkpoint/manifest.h"

namespace zeroshard {

// The manifest of the checkpoint in folder `path`, when it is sound and every file is there in its
// size. NOT_FOUND: no such folder; DATA_LOSS and INVALID_ARGUMENT name the file and the reason.
absl::StatusOr<Manifest> ReadAndCheckSizes(const std::string& path);

}  // namespace zeroshard
