#include "common/member/host_info.h"

#include <unistd.h>

#include <algorithm>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "common/files.h"

namespace zeroshard {

std::string HostName() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return "localhost";
  return name;
}

uint64_t MemoryLimitBytes() {
  uint64_t limit =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    const absl::StatusOr<std::string> text = ReadFile(path, 64);
    uint64_t value = 0;
    if (text.ok() && absl::SimpleAtoi(absl::StripAsciiWhitespace(*text), &value) && value > 0) {
      limit = std::min(limit, value);
    }
  }
  return limit;
}

std::string AdvertisedHost(const std::string& advertised, const std::string& listen_host) {
  if (!advertised.empty()) return advertised;
  if (listen_host == "0.0.0.0" || listen_host == "::" || listen_host == "*") return HostName();
  return listen_host;
}

}  // namespace zeroshard
