// Checks that the sections of a specification share. Messages name the key, the value seen and the
// value wanted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace zeroshard {

// Steps and counts stay exact in a double and in JSON.
constexpr uint64_t kMaxCount = uint64_t{1} << 53;

template <typename... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// Quoted, escaped and cut short.
std::string Shown(const std::string& text);

absl::Status CheckChoice(absl::string_view path, const std::string& seen,
                         const std::vector<std::string>& wanted);
// What a file system takes: 1 to 4095 bytes, no control characters (a NUL would end the path for
// the system and not for us).
absl::Status CheckPath(absl::string_view path, const std::string& seen);
// In [low, high].
absl::Status CheckCount(absl::string_view path, uint64_t seen, uint64_t low, uint64_t high);
absl::Status CheckReal(absl::string_view path, double seen, bool good, absl::string_view wanted);

}  // namespace zeroshard
