#include "common/crash_point.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/log.h"

namespace zeroshard::crash_point {
namespace {

constexpr char kVariable[] = "ZEROSHARD_CRASH_AT";

struct Wanted {
  std::string name;
  uint32_t rank = kAnyRank;
  uint64_t step = 0;
  std::string file;
};

std::optional<Wanted> ReadEnvironment() {
  const char* text = std::getenv(kVariable);
  if (text == nullptr || *text == '\0') return std::nullopt;
  const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits(':', 2));
  Wanted wanted;
  const std::vector<std::string> names = absl::StrSplit(parts[0], absl::MaxSplits('@', 1));
  wanted.name = names[0];
  const bool read = parts.size() >= 2 && !wanted.name.empty() &&
                    absl::SimpleAtoi(parts[1], &wanted.step) &&
                    (names.size() == 1 || absl::SimpleAtoi(names[1], &wanted.rank));
  if (!read) {
    LogError(kVariable, " is \"", text,
             "\", wanted NAME[@RANK]:STEP[:FILE] with numbers for RANK and STEP "
             "(common/crash_point.h); this process crashes nowhere");
    return std::nullopt;
  }
  if (parts.size() == 3) wanted.file = parts[2];
  return wanted;
}

// False where another process, or this one in an earlier life, was first.
bool IsFirst(const std::string& file) {
  if (file.empty()) return true;
  const int fd = open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd >= 0) {
    close(fd);
    return true;
  }
  if (errno != EEXIST) {
    LogError(kVariable, ": cannot create ", file, ": ", std::strerror(errno),
             "; this process goes on");
  }
  return false;
}

}  // namespace

std::atomic<bool> armed = true;

void Reach(absl::string_view name, uint64_t step, uint32_t rank, absl::Duration linger) {
  static std::mutex mutex;
  // Held until death: whoever comes here meanwhile gets no further.
  std::lock_guard<std::mutex> lock(mutex);
  static const std::optional<Wanted>& wanted = *new std::optional<Wanted>(ReadEnvironment());
  if (!wanted) armed = false;
  if (!armed || name != wanted->name || step != wanted->step ||
      (wanted->rank != kAnyRank && rank != wanted->rank)) {
    return;
  }
  if (!IsFirst(wanted->file)) {
    armed = false;
    return;
  }
  LogWarning("killed at ", name, " of step ", step, ", as ", kVariable, " asks for");
  if (linger > absl::ZeroDuration()) absl::SleepFor(linger);
  kill(getpid(), SIGKILL);
  while (true) pause();  // for the moment that the signal takes
}

}  // namespace zeroshard::crash_point
