// The version that every binary prints and every member announces.
#pragma once

namespace zeroshard {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace zeroshard
