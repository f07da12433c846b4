// The text of every id.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace zeroshard {

// Immutable once filled; thread-safe then.
class TokenTable {
 public:
  // More than twenty times the largest vocabulary in use; bounds what an id can make us allocate.
  static constexpr int32_t kLargestId = (1 << 22) - 1;

  enum class Kind : uint8_t { kNone, kVocabulary, kAdded, kSpecial };

  // `id` in [0, kLargestId]. An added token replaces the text of the vocabulary's.
  void Set(int32_t id, absl::string_view text, Kind kind);

  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  Kind kind(int32_t id) const {
    return id < 0 || id >= size() ? Kind::kNone : entries_[static_cast<size_t>(id)].kind;
  }
  // Empty where there is no such id. Lives as long as the table is not changed.
  absl::string_view text(int32_t id) const;
  // Added tokens before those of the vocabulary.
  std::optional<int32_t> Find(absl::string_view text) const;
  // OUT_OF_RANGE names an id without a token.
  absl::Status Append(absl::Span<const int32_t> ids, bool skip_special, std::string* text) const;

 private:
  struct Entry {
    size_t begin = 0;
    uint32_t length = 0;
    Kind kind = Kind::kNone;
  };
  std::vector<Entry> entries_;
  std::string bytes_;
};

}  // namespace zeroshard
