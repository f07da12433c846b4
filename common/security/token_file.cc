#include "common/security/token_file.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/files.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace zeroshard::security {
namespace {

constexpr absl::Duration kLookEvery = absl::Seconds(1);

std::array<uint8_t, 32> DigestOf(absl::string_view text) {
  std::array<uint8_t, 32> digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

bool SameFile(const struct stat& a, const struct stat& b) {
  return a.st_ino == b.st_ino && a.st_dev == b.st_dev && a.st_size == b.st_size &&
         a.st_mtim.tv_sec == b.st_mtim.tv_sec && a.st_mtim.tv_nsec == b.st_mtim.tv_nsec;
}

absl::StatusOr<std::vector<std::string>> ReadTokens(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, size_t{1} << 20);
  if (!text.ok()) return absl::InvalidArgumentError(text.status().message());
  std::vector<std::string> tokens;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (line.empty()) continue;
    const bool good = line.size() >= TokenFile::kLeast && line.size() <= TokenFile::kMost &&
                      std::all_of(line.begin(), line.end(),
                                  [](unsigned char c) { return absl::ascii_isgraph(c); });
    if (!good) {  // the token itself is not for a log
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": token ", tokens.size() + 1, " has ", line.size(), " characters, wanted ",
          TokenFile::kLeast, " to ", TokenFile::kMost,
          " printable ones without spaces, one token a line (openssl rand -hex 32 makes one)"));
    }
    tokens.emplace_back(line);
  }
  if (tokens.empty() || tokens.size() > TokenFile::kMostTokens) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", tokens.size(),
                                                   " tokens in it, wanted 1 to ",
                                                   TokenFile::kMostTokens, ", one a line"));
  }
  return tokens;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(const std::string& path,
                                                           const Clock* clock) {
  std::unique_ptr<TokenFile> file(new TokenFile(path, clock));
  ZS_RETURN_IF_ERROR(file->Load());
  return file;
}

absl::Status TokenFile::Load() {
  looked_ = clock_->Now();
  struct stat now = {};
  stat(path_.c_str(), &now);
  seen_ = now;
  ZS_ASSIGN_OR_RETURN(const std::vector<std::string> tokens, ReadTokens(path_));
  first_ = tokens.front();
  digests_.clear();
  for (const std::string& token : tokens) digests_.push_back(DigestOf(token));
  return absl::OkStatus();
}

void TokenFile::Refresh() {
  if (clock_->Now() - looked_ < kLookEvery) return;
  looked_ = clock_->Now();
  struct stat now = {};
  if (stat(path_.c_str(), &now) != 0 || SameFile(now, seen_)) return;
  if (const absl::Status loaded = Load(); !loaded.ok()) {
    LogWarning(loaded.message(), "; the tokens before it stay");
  } else {
    LogInfo(digests_.size(), " tokens read again from ", path_);
  }
}

std::string TokenFile::First() {
  std::lock_guard<std::mutex> lock(mutex_);
  Refresh();
  return first_;
}

bool TokenFile::Contains(absl::string_view token) {
  const Digest digest = DigestOf(token);
  std::lock_guard<std::mutex> lock(mutex_);
  Refresh();
  bool found = false;
  for (const Digest& known : digests_) {
    found |= CRYPTO_memcmp(known.data(), digest.data(), digest.size()) == 0;
  }
  return found;
}

}  // namespace zeroshard::security
