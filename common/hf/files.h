// Which files of a Hugging Face folder hold its weights, and which of their tensors count.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/safetensors/safetensors.h"

namespace zeroshard {

struct HfFiles {
  struct Place {
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
  };
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  std::map<std::string, Place> tensors;  // by name in the files
};

// Maps model.safetensors, or, where there is a model.safetensors.index.json, the files it names:
// the index decides, also between a tensor's copies in two of them. Headers alone are read.
// Warnings, a line each: a model.safetensors beside an index, copies, tensors that the index does
// not list, a wrong total_size. NOT_FOUND: no weights, or a file that the index names is missing.
// INVALID_ARGUMENT: the index is no such file, names a path outside the folder, or a file that
// lacks the tensor.
absl::StatusOr<HfFiles> OpenHfFiles(const std::string& folder, std::vector<std::string>* warnings);

// "a, b and 12 more", at most ten of them, for messages.
std::string ListNames(const std::vector<std::string>& names);

}  // namespace zeroshard
