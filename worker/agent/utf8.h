// Text for protobuf's string fields, which hold UTF-8 and nothing else.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace zeroshard {

// `text` with every byte that belongs to no whole character (RFC 3629: no surrogates, no overlong
// forms) replaced by U+FFFD. At most `most` bytes; what is longer is cut between two characters.
std::string ValidUtf8(absl::string_view text, size_t most);

}  // namespace zeroshard
