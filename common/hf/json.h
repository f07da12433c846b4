// JSON objects of other programs, read strictly: every value is asked for by its type, and what was
// not asked for can be listed.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace zeroshard {

// An object, keys in the file's order. INVALID_ARGUMENT names `where`: no JSON, no object, a key
// twice in one object, nested deeper than 64.
absl::StatusOr<nlohmann::ordered_json> ParseJsonObject(absl::string_view text,
                                                       const std::string& where);

// The fields of one object. The first thing that is wrong is kept in status(), and every later
// answer is a default. A null is no field. Borrows the object. One thread at a time.
class JsonFields {
 public:
  // `path` precedes field names in messages: "rope_scaling.".
  JsonFields(const nlohmann::ordered_json& object, std::string where, std::string path = "");

  bool Has(const std::string& name);  // counts as asked for

  // A whole number in [low, high]. Without a default the field must be there.
  int64_t Count(const std::string& name, int64_t low, int64_t high,
                std::optional<int64_t> fallback = std::nullopt);
  // A finite number above `low` (or equal to it, where `inclusive`).
  double Real(const std::string& name, double low, bool inclusive,
              std::optional<double> fallback = std::nullopt);
  bool Flag(const std::string& name, bool fallback);
  std::string Text(const std::string& name, std::optional<std::string> fallback = std::nullopt);
  // nullptr where there is none; a value of another type is wrong.
  const nlohmann::ordered_json* Object(const std::string& name);

  // Refuses a field that is there with another value than `only`; `why` says what would change.
  void RequireFlag(const std::string& name, bool only, const std::string& why);
  void RequireText(const std::string& name, const std::vector<std::string>& wanted,
                   const std::string& why);
  // Keeps "<where>: <path><name> is <seen>; wanted <wanted>" unless something was wrong before.
  void Refuse(const std::string& name, const std::string& wanted);
  void Refuse(const absl::Status& status);

  // Names with a value that were neither asked for nor are in `known`.
  std::vector<std::string> Others(const std::set<std::string>& known) const;

  const std::string& where() const { return where_; }
  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::ordered_json* Find(const std::string& name);
  std::string Shown(const std::string& name) const;

  const nlohmann::ordered_json& object_;
  const std::string where_;
  const std::string path_;
  std::set<std::string> asked_;
  absl::Status status_;
};

}  // namespace zeroshard
