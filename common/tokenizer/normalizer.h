// Unicode normalization form C, as Hugging Face's tokenizers have it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace zeroshard {

// Whether text may be cut before the code point without changing its normal form: a starter that
// neither decomposes nor composes with what is before it.
bool IsNormalizationBoundary(uint32_t code_point);

// Form C of `text`, which is UTF-8: `text` itself where nothing changes, else in `*storage`; lives
// as long as the two. Linear but for a sort of marks that follow one another (Unicode Standard
// Annex 15; a code point that is younger than Unicode 9 is left alone, see README.md).
absl::string_view NormalizeNfc(absl::string_view text, std::string* storage);

}  // namespace zeroshard
