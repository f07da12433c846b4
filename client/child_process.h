// A program run as a child that cannot outlive this process.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace zeroshard {

struct ExitInfo {
  int exit_code = 0;
  int signal = 0;  // 0: it ended by itself, with exit_code

  std::string ToString() const;  // "ended with exit code 3", "was killed by signal 9 (Killed)"
};

// Starts argv[0] (a path) with stdin from /dev/null and stdout and stderr appended to `log_path`,
// in a process group of its own, so that a terminal's Ctrl-C reaches only this process. The kernel
// kills the child when the calling thread ends, by whatever: call this from the main thread.
// NOT_FOUND, PERMISSION_DENIED, INTERNAL: what exec or open said, with the path.
absl::StatusOr<pid_t> SpawnChild(const std::vector<std::string>& argv, const std::string& log_path);

// How the child ended; nothing while it runs. Forgets it: ask no more after an answer.
std::optional<ExitInfo> ReapChild(pid_t pid);

}  // namespace zeroshard
