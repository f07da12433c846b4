// The letters that byte-level vocabularies write bytes with: printable Latin-1 bytes are
// themselves, the other 68 are U+0100 and what follows, in order (Radford et al. 2019, GPT-2's
// encoder).
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace zeroshard {

// The bytes that `token`, UTF-8, is written for; false where it holds another letter.
bool BytesOfLetters(absl::string_view token, std::string* bytes);

}  // namespace zeroshard
