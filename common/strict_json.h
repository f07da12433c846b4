// JSON out of files that others wrote. Pure functions, thread-safe.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace zeroshard {

// What is kept is shown, copied and compared by recursion, so a tree must not be deep.
constexpr int kMaxJsonDepth = 64;

// One value, with nothing but white space around it. `Json` is nlohmann::json (large objects are
// searched quickly) or nlohmann::ordered_json (keys in the file's order). It ends at the first
// thing that is wrong, before any more is kept.
// INVALID_ARGUMENT, without the place, which the caller knows: no JSON (and where), nested deeper
// than kMaxJsonDepth, a key twice in one object.
template <typename Json>
absl::StatusOr<Json> ParseStrictJson(absl::string_view text);

extern template absl::StatusOr<nlohmann::json> ParseStrictJson(absl::string_view text);
extern template absl::StatusOr<nlohmann::ordered_json> ParseStrictJson(absl::string_view text);

// Text of a file as a message quotes it: one line, of at most so many bytes.
std::string OneLine(absl::string_view text, size_t longest = 80);

}  // namespace zeroshard
