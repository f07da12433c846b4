// Files of token ids. All numbers are little-endian. A file is one of:
//   llm.c, 16 bits: int32 header[256] = {20240520, 1, n, unused...}, then n uint16
//   llm.c, 32 bits: int32 header[256] = {20240801, 7, n, unused...}, then n uint32
//   nanoGPT:        uint16 from the first byte on
//   Megatron:       ids of one of six integer types, described by a second file (megatron.h)
// Without a word from the job the first four bytes tell the first three apart. No tokenizer writes
// llm.c's magic at the start of a raw file unless ids 55432 (or 55713) and 308 follow one another
// there; version and count must agree as well, and where they do not the file is refused, rather
// than read the other way, until data.format says what it is.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace zeroshard {

enum class TokenFormat : uint8_t { kAuto, kLlmC, kNanoGpt, kMegatron };

// auto (or empty), llm.c, nanogpt, megatron; INVALID_ARGUMENT for another name.
absl::StatusOr<TokenFormat> TokenFormatOf(absl::string_view name);

enum class IdType : uint8_t { kUint8, kInt8, kUint16, kInt16, kUint32, kInt32, kInt64 };

// Bytes of an id.
int WidthOf(IdType type);

struct TokenLayout {
  int64_t offset = 0;  // bytes before the first id
  IdType type = IdType::kUint16;
  int64_t count = 0;  // ids
};

// Finds out how `bytes`, a whole file, holds its ids; `format` is not kMegatron. INVALID_ARGUMENT
// names the file, what was seen and what was wanted: an empty file, an odd byte count, a version
// that is not known, a header count that does not match the size; with kAuto also a file of another
// format, and text.
absl::StatusOr<TokenLayout> RecognizeTokenFile(const std::string& path,
                                               absl::Span<const uint8_t> bytes, TokenFormat format);

// Reads every id. INVALID_ARGUMENT names file, token offset, id and vocabulary size of the first
// that is negative or >= vocab_size, or says that 16-bit ids look like 32-bit ones without a
// header.
absl::Status CheckTokenIds(const std::string& path, absl::Span<const uint8_t> bytes,
                           const TokenLayout& layout, int64_t vocab_size);

// Copies `to.size()` ids from id `first` on, all of which must be in the file. Returns the place
// in `to` of the first that is negative or >= vocab_size (at most 2^31 - 1), and its value in *bad;
// to.size() if there is none.
int64_t CopyTokenIds(absl::Span<const uint8_t> bytes, const TokenLayout& layout, int64_t first,
                     int64_t vocab_size, absl::Span<int32_t> to, int64_t* bad);

}  // namespace zeroshard
