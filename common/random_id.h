// Names that nobody else has: incarnations, cluster ids.
#pragma once

#include <string>

namespace zeroshard {

// 128 bits from the kernel's generator as 32 lower-case hex digits. Thread-safe. The process ends
// with a message if the kernel has no randomness to give: going on with a guessable id would let
// two processes take each other's place.
std::string RandomId();

}  // namespace zeroshard
