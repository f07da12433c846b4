// Text files to one file of token ids, on all cores.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/tokenizer/tokenizer.h"

namespace zeroshard {

struct TokenizeOptions {
  std::vector<std::string> inputs;  // files, and folders that stand for all files below them
  std::string output;
  std::string format;                // of every file: auto | text | jsonl
  std::optional<int32_t> separator;  // follows every document
  int threads = 1;
  // Tests make these small. A longer text is cut where the tokenizer lets it.
  size_t piece_bytes = 1 << 20;
  int64_t most_tokens = INT32_MAX;  // what the file's header can say
};

struct TokenizeProgress {
  int64_t bytes = 0;  // read
  int64_t total_bytes = 0;
  int64_t documents = 0;  // written
  int64_t tokens = 0;     // with separators
};

// Writes the ids of every document, in the order of the files, in llm.c's format, little-endian:
// int32 header[256] = {magic, version, count, 0, ...}, then the ids, uint16 (magic 20240520,
// version 1) where the vocabulary has at most 65536 of them, else uint32 (20240801, 7). Documents
// without text are left out. The file appears whole, or not at all, and takes the place of a
// regular file only: links, pipes, devices and folders are refused before anything is read. Memory:
// about 20 bytes a byte of two pieces a thread; a text that the tokenizer cannot cut, or a line of
// JSON, is a piece. INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED or INTERNAL name the file and
// the line or the system's reason; OUT_OF_RANGE: more tokens than the header can count. `progress`
// is called from this thread, some times a second at most.
absl::StatusOr<TokenizeProgress> TokenizeFiles(
    const Tokenizer& tokenizer, const TokenizeOptions& options,
    const std::function<void(const TokenizeProgress&)>& progress);

}  // namespace zeroshard
