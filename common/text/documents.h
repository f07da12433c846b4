// Documents out of files: plain text and JSON lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace zeroshard {

enum class TextFormat { kText, kJsonLines };

// A text file is one document, less a UTF-8 byte order mark; its bytes are otherwise kept as they
// are (CRLF, NUL, what is not UTF-8, a missing last newline). A JSON line is one document:
// {"text": ...}, or {"prompt": ..., "completion": ...}, whose prompt carries no loss.
struct Document {
  std::string prompt;  // empty unless the line has one
  std::string text;    // or the completion
  int64_t line = 0;    // of the file, from 1; 0: not of a line
};

// How many bytes from a file's beginning TextFormatOf looks at.
inline constexpr size_t kFormatBytes = 64 << 10;

// By the name's end (.jsonl, .ndjson: JSON lines; else text) where `format` is "auto" or empty;
// text | jsonl otherwise. `start`: the file, or its first kFormatBytes at least.
// INVALID_ARGUMENT for another format, and under auto for what would be read as text and looks as
// if it were none: JSON lines by another name, token files, archives, more than a tenth of NULs.
absl::StatusOr<TextFormat> TextFormatOf(const std::string& path, absl::string_view format,
                                        absl::string_view start);

// Calls `each` for every document of `bytes`, the whole file at `path`, in order. Empty lines are
// skipped. INVALID_ARGUMENT names the file, the line and what is wrong with it (no JSON object, no
// such field, a field that is not text); an error of `each` ends it.
absl::Status ForEachDocument(const std::string& path, absl::string_view bytes, TextFormat format,
                             const std::function<absl::Status(Document&&)>& each);

// The parts of the above, for those who cut a large file themselves. `bytes` are whole lines, of
// which the first is line `first_line` of the file (from 1).
absl::Status ForEachJsonLine(const std::string& path, absl::string_view bytes, int64_t first_line,
                             const std::function<absl::Status(Document&&)>& each);
// The bytes of a whole file without the mark in front.
absl::string_view WithoutByteOrderMark(absl::string_view bytes);

}  // namespace zeroshard
