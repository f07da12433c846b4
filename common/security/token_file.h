// Bearer tokens of clients, from a file that may change while it is used.
#pragma once

#include <sys/stat.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/clock.h"

namespace zeroshard::security {

// One token a line, the newest first, so that an old one may stay valid for a while. Thread-safe.
class TokenFile {
 public:
  static constexpr size_t kLeast = 16;  // characters of a token
  static constexpr size_t kMost = 1024;
  static constexpr size_t kMostTokens = 100;

  // INVALID_ARGUMENT: unreadable, empty, or with a token that is too short, too long or has
  // characters that a header cannot carry.
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& path,
                                                         const Clock* clock);

  // The first one.
  std::string First();
  // In a time that does not depend on the tokens.
  bool Contains(absl::string_view token);

 private:
  using Digest = std::array<uint8_t, 32>;

  TokenFile(std::string path, const Clock* clock) : path_(std::move(path)), clock_(clock) {}
  absl::Status Load();
  void Refresh();

  const std::string path_;
  const Clock* const clock_;
  std::mutex mutex_;
  absl::Duration looked_;
  struct stat seen_ = {};
  std::string first_;
  std::vector<Digest> digests_;
};

}  // namespace zeroshard::security
