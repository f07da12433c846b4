// Small files written so that a reader never sees half of one.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace zeroshard {

// Creates the folder and its parents; fine when it is there. Errors name the path and the reason.
absl::Status MakeFolders(const std::string& path);

// Writes beside `path`, syncs and renames over it: there is the old content or the new, never a
// part.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view content);

// NOT_FOUND; INVALID_ARGUMENT where it is no regular file; OUT_OF_RANGE when the file is larger
// than `limit` bytes.
absl::StatusOr<std::string> ReadFile(const std::string& path, size_t limit = 64 << 20);

// An error that names the path and what errno says: "cannot open /a/b: Permission denied".
absl::Status ErrnoError(int error, absl::string_view doing, const std::string& path);

// Where a daemon listens, for supervisors that let it take a free port. The file is JSON:
//   {"grpc": "127.0.0.1:40123", "metrics": "127.0.0.1:40124", "pid": 4711}
struct PortFile {
  std::string grpc;     // empty: none
  std::string metrics;  // empty: none
  long pid = 0;
};
absl::Status WritePortFile(const std::string& path, const PortFile& ports);
// NOT_FOUND while the daemon has not written it yet; INVALID_ARGUMENT when it is no such file.
absl::StatusOr<PortFile> ReadPortFile(const std::string& path);

}  // namespace zeroshard
