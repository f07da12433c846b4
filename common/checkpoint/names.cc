#include "common/checkpoint/names.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/checkpoint/store.h"

namespace zeroshard {
namespace {

bool AllDigits(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isdigit(static_cast<unsigned char>(c));
  });
}

// Digits without leading zeros, as StrCat writes them.
std::optional<int64_t> PlainNumber(absl::string_view text) {
  int64_t value = 0;
  if (!AllDigits(text) || (text.size() > 1 && text[0] == '0') || !absl::SimpleAtoi(text, &value)) {
    return std::nullopt;
  }
  return value;
}

}  // namespace

std::string CheckpointName(uint64_t step) { return absl::StrFormat("step-%08d", step); }

std::string CollectFolder(const std::string& dir, uint64_t step) {
  return absl::StrCat(dir, "/.", CheckpointName(step), ".tmp");
}

std::string DeleteFolder(const std::string& dir, uint64_t step) {
  return absl::StrCat(dir, "/.", CheckpointName(step), ".old");
}

std::string LatestTemporary(const std::string& dir) { return absl::StrCat(dir, "/.latest.tmp"); }

std::optional<uint64_t> StepOfName(absl::string_view name) {
  uint64_t step = 0;
  absl::string_view digits = name;
  if (!absl::ConsumePrefix(&digits, "step-") || !AllDigits(digits) ||
      !absl::SimpleAtoi(digits, &step) || CheckpointName(step) != name) {
    return std::nullopt;
  }
  return step;
}

bool IsLeftover(absl::string_view name) {
  if (name == ".latest.tmp") return true;
  return absl::ConsumePrefix(&name, ".") &&
         (absl::ConsumeSuffix(&name, ".tmp") || absl::ConsumeSuffix(&name, ".old")) &&
         StepOfName(name).has_value();
}

std::string StateFileName(int rank, int world) {
  return absl::StrFormat("state-%05d-of-%05d.safetensors", rank, world);
}

bool IsStateFileName(absl::string_view name) {
  return absl::StartsWith(name, "state-") && absl::EndsWith(name, ".safetensors") &&
         !absl::StrContains(name, '/');
}

bool StaysInside(absl::string_view name) {
  if (name.empty() || name.size() > 1024) return false;
  for (const char c : name) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) return false;
  }
  for (const absl::string_view part : absl::StrSplit(name, '/')) {
    if (part.empty() || part == "." || part == ".." || part.size() > 255) return false;
  }
  return true;
}

std::string FormatStateName(const StateName& name) {
  std::string text = absl::StrCat(NameOf(name.kind), "/", name.tensor);
  if (!name.whole) absl::StrAppend(&text, "/", name.begin, "-", name.end);
  return text;
}

std::optional<StateName> ParseStateName(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '/');
  if (parts.size() < 2 || parts.size() > 3 || parts[1].empty()) return std::nullopt;
  StateName name;
  int kind = 0;
  while (kind < kStateKinds && parts[0] != NameOf(static_cast<StateKind>(kind))) ++kind;
  if (kind == kStateKinds) return std::nullopt;
  name.kind = static_cast<StateKind>(kind);
  name.tensor = std::string(parts[1]);
  if (parts.size() == 2) return name;
  const std::vector<absl::string_view> range = absl::StrSplit(parts[2], '-');
  if (range.size() != 2) return std::nullopt;
  const std::optional<int64_t> begin = PlainNumber(range[0]);
  const std::optional<int64_t> end = PlainNumber(range[1]);
  if (!begin || !end || *begin > *end) return std::nullopt;
  name.whole = false;
  name.begin = *begin;
  name.end = *end;
  return name;
}

std::string ShapeKey(const std::string& tensor) { return absl::StrCat("shape:", tensor); }

std::string FormatShape(const std::vector<int64_t>& shape) { return absl::StrJoin(shape, "x"); }

std::optional<std::vector<int64_t>> ParseShape(absl::string_view text) {
  std::vector<int64_t> shape;
  if (text.empty()) return shape;
  for (const absl::string_view part : absl::StrSplit(text, 'x')) {
    const std::optional<int64_t> extent = PlainNumber(part);
    if (!extent) return std::nullopt;
    shape.push_back(*extent);
  }
  return shape;
}

std::optional<int64_t> ElementsOf(const std::vector<int64_t>& shape) {
  constexpr int64_t kMost = int64_t{1} << 60;
  int64_t elements = 1;
  for (const int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(elements, extent, &elements) || elements > kMost) {
      return std::nullopt;
    }
  }
  return elements;
}

std::string CanonicalPath(const std::string& path) {
  std::error_code error;
  std::filesystem::path full = std::filesystem::weakly_canonical(path, error);
  if (error) full = std::filesystem::path(path).lexically_normal();
  std::string text = full.string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

}  // namespace zeroshard
