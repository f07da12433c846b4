// Files of token ids. All numbers are little-endian. A file is one of:
//   llm.c, 16 bits: int32 header[256] = {20240520, 1, n, unused...}, then n uint16
//   llm.c, 32 bits: int32 header[256] = {20240801, 7, n, unused...}, then n uint32
//   nanoGPT:        uint16 from the first byte on
// The first four bytes decide. No text tokenizer writes the header's magic at the start of a raw
// file by chance unless ids 308 and 55448 (or 55729) follow one another there; the version and the
// count must agree as well, and where they do not the file is refused rather than read the other
// way.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace zeroshard {

struct TokenLayout {
  int64_t offset = 0;  // bytes before the first id
  int width = 2;       // bytes of an id: 2 or 4
  int64_t count = 0;   // ids
};

// Finds out how `bytes`, a whole file, holds its ids. INVALID_ARGUMENT names the file, what was
// seen and what was wanted: an empty file, an odd byte count, a version that is not known, a header
// count that does not match the size, a file of another format.
absl::StatusOr<TokenLayout> RecognizeTokenFile(const std::string& path,
                                               absl::Span<const uint8_t> bytes);

// Reads every id. INVALID_ARGUMENT names file, token offset, id and vocabulary size of the first
// that is >= vocab_size, or says that the file looks like 32-bit ids without a header.
absl::Status CheckTokenIds(const std::string& path, absl::Span<const uint8_t> bytes,
                           const TokenLayout& layout, int64_t vocab_size);

}  // namespace zeroshard
