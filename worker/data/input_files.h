// Which files a job's data.train (or eval.data) names, in the order they are read.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace zeroshard {

struct InputFile {
  std::string path;
  bool named = false;  // by the job itself, not found in a folder
};

// The entries of `paths` in their order: a file as it is, a folder as all regular files below it in
// the order of the bytes of their paths. In a folder: names that start with a dot are skipped, and
// so are files that do not end with `suffix` (empty: none); a symbolic link counts if it leads to a
// regular file. A file that was listed already (same device and inode) is not listed again, so that
// a text with two names is read once. INVALID_ARGUMENT, NOT_FOUND or PERMISSION_DENIED name the
// entry and `key`, what the job calls the list.
absl::StatusOr<std::vector<InputFile>> ListInputFiles(const std::vector<std::string>& paths,
                                                      const std::string& suffix,
                                                      const std::string& key = "data.train");

}  // namespace zeroshard
