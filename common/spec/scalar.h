// The scalars of YAML's core schema (YAML 1.2.2, section 10.3.2) that specifications use, read
// strictly: no octal, no hexadecimal, no yes and no. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace zeroshard {

bool IsNumberText(absl::string_view text);
bool IsNullText(absl::string_view text);
std::optional<bool> BoolFromText(absl::string_view text);

// A finite number.
std::optional<double> DoubleFromText(absl::string_view text);

// A whole number in [0, limit]; 5e8 and 16.0 are whole numbers too.
std::optional<uint64_t> UnsignedFromText(absl::string_view text, uint64_t limit);

// The shortest text that reads back as the same double, always with a mark of a real number.
std::string DoubleToText(double value);

}  // namespace zeroshard
