#include "common/hf/json.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/spec/scalar.h"
#include "common/strict_json.h"

namespace zeroshard {
namespace {

using Json = nlohmann::ordered_json;

}  // namespace

absl::StatusOr<Json> ParseJsonObject(absl::string_view text, const std::string& where) {
  absl::StatusOr<Json> json = ParseStrictJson<Json>(text);
  if (!json.ok()) {
    return absl::Status(json.status().code(), absl::StrCat(where, ": ", json.status().message()));
  }
  if (json->is_object()) return json;
  return absl::InvalidArgumentError(
      absl::StrCat(where, ": it is a JSON ", json->type_name(), "; wanted an object"));
}

JsonFields::JsonFields(const Json& object, std::string where, std::string path)
    : object_(object), where_(std::move(where)), path_(std::move(path)) {}

const Json* JsonFields::Find(const std::string& name) {
  asked_.insert(name);
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool JsonFields::Has(const std::string& name) { return Find(name) != nullptr; }

std::string JsonFields::Shown(const std::string& name) const {
  const auto found = object_.find(name);
  if (found == object_.end()) return "missing";
  return absl::StrCat(
      "is ", OneLine(found->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)));
}

void JsonFields::Refuse(const std::string& name, const std::string& wanted) {
  if (!status_.ok()) return;
  const std::string shown = Shown(name);
  status_ = absl::InvalidArgumentError(absl::StrCat(
      where_, ": ", path_, name, shown == "missing" ? " is " : " ", shown, "; wanted ", wanted));
}

void JsonFields::Refuse(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

int64_t JsonFields::Count(const std::string& name, int64_t low, int64_t high,
                          std::optional<int64_t> fallback) {
  const Json* value = Find(name);
  if (value == nullptr && fallback) return *fallback;
  if (value != nullptr && value->is_number_integer()) {
    // An unsigned number beyond int64 would turn negative.
    const bool fits = !value->is_number_unsigned() || value->get<uint64_t>() <= uint64_t{1} << 62;
    const int64_t seen = fits ? value->get<int64_t>() : -1;
    if (fits && seen >= low && seen <= high) return seen;
  }
  Refuse(name, absl::StrCat("a whole number from ", low, " to ", high));
  return low;
}

double JsonFields::Real(const std::string& name, double low, bool inclusive,
                        std::optional<double> fallback) {
  const Json* value = Find(name);
  if (value == nullptr && fallback) return *fallback;
  if (value != nullptr && value->is_number()) {
    const double seen = value->get<double>();
    if (std::isfinite(seen) && (inclusive ? seen >= low : seen > low)) return seen;
  }
  Refuse(name, absl::StrCat("a number ", inclusive ? "from " : "above ", DoubleToText(low)));
  return low;
}

bool JsonFields::Flag(const std::string& name, bool fallback) {
  const Json* value = Find(name);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  Refuse(name, "true or false");
  return fallback;
}

std::string JsonFields::Text(const std::string& name, std::optional<std::string> fallback) {
  const Json* value = Find(name);
  if (value == nullptr && fallback) return *fallback;
  if (value != nullptr && value->is_string()) return value->get<std::string>();
  Refuse(name, "text");
  return "";
}

const Json* JsonFields::Object(const std::string& name) {
  const Json* value = Find(name);
  if (value == nullptr || value->is_object()) return value;
  Refuse(name, "an object");
  return nullptr;
}

void JsonFields::RequireFlag(const std::string& name, bool only, const std::string& why) {
  if (Flag(name, only) != only) Refuse(name, absl::StrCat(only ? "true" : "false", ": ", why));
}

void JsonFields::RequireText(const std::string& name, const std::vector<std::string>& wanted,
                             const std::string& why) {
  const std::string seen = Text(name, wanted.front());
  if (std::find(wanted.begin(), wanted.end(), seen) != wanted.end()) return;
  Refuse(name, absl::StrCat(absl::StrJoin(wanted, " or "), ": ", why));
}

std::vector<std::string> JsonFields::Others(const std::set<std::string>& known) const {
  std::vector<std::string> others;
  for (const auto& [name, value] : object_.items()) {
    if (value.is_null() || asked_.count(name) > 0 || known.count(name) > 0) continue;
    others.push_back(OneLine(name));
  }
  return others;
}

}  // namespace zeroshard
