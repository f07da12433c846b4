#include "common/text/documents.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strict_json.h"

namespace zeroshard {
namespace {

using Json = nlohmann::json;

constexpr absl::string_view kByteOrderMark = "\xEF\xBB\xBF";
// Of a line: what its JSON becomes in memory is several times as large.
constexpr size_t kLongestLine = 64 << 20;

absl::Status LineError(const std::string& path, int64_t line, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(
      path, ":", line, ": ", what,
      "; a line holds a document, {\"text\": ...} or {\"prompt\": ..., \"completion\": ...}"));
}

// The text of a field that is there.
absl::StatusOr<std::string> TextOf(const std::string& path, int64_t line, Json* json,
                                   const char* field) {
  Json& value = (*json)[field];
  if (!value.is_string()) {
    return LineError(path, line,
                     absl::StrCat("the field ", field, " is no text but ", value.type_name()));
  }
  return std::move(value.get_ref<std::string&>());
}

absl::StatusOr<Document> ParseLine(const std::string& path, int64_t line, absl::string_view text) {
  absl::StatusOr<Json> parsed = ParseStrictJson<Json>(text);
  if (!parsed.ok()) return LineError(path, line, parsed.status().message());
  Json& json = *parsed;
  if (!json.is_object()) {
    return LineError(path, line, absl::StrCat("no JSON object but ", json.type_name()));
  }
  const bool prompt = json.contains("prompt");
  const bool completion = json.contains("completion");
  Document document;
  document.line = line;
  if (json.contains("text")) {
    if (prompt || completion) {
      return LineError(path, line, "has both text and prompt or completion");
    }
    ZS_ASSIGN_OR_RETURN(document.text, TextOf(path, line, &json, "text"));
    return document;
  }
  if (prompt != completion) {
    return LineError(path, line,
                     prompt ? "has a prompt but no completion" : "has a completion but no prompt");
  }
  if (!prompt) return LineError(path, line, "has neither text nor prompt and completion");
  ZS_ASSIGN_OR_RETURN(document.prompt, TextOf(path, line, &json, "prompt"));
  ZS_ASSIGN_OR_RETURN(document.text, TextOf(path, line, &json, "completion"));
  return document;
}

bool IsBlank(absl::string_view line) {
  return line.find_first_not_of(" \t\r") == absl::string_view::npos;
}

}  // namespace

absl::StatusOr<TextFormat> TextFormatOf(const std::string& path, absl::string_view format) {
  if (format == "text") return TextFormat::kText;
  if (format == "jsonl") return TextFormat::kJsonLines;
  if (!format.empty() && format != "auto") {
    return absl::InvalidArgumentError(
        absl::StrCat("no text format ", format, " (", path, "); there are auto, text and jsonl"));
  }
  return absl::EndsWithIgnoreCase(path, ".jsonl") || absl::EndsWithIgnoreCase(path, ".ndjson")
             ? TextFormat::kJsonLines
             : TextFormat::kText;
}

absl::string_view WithoutByteOrderMark(absl::string_view bytes) {
  return absl::StartsWith(bytes, kByteOrderMark) ? bytes.substr(kByteOrderMark.size()) : bytes;
}

absl::Status ForEachJsonLine(const std::string& path, absl::string_view bytes, int64_t first_line,
                             const std::function<absl::Status(Document&&)>& each) {
  for (int64_t line = first_line; !bytes.empty(); ++line) {
    const size_t end = std::min(bytes.find('\n'), bytes.size());
    const absl::string_view text = bytes.substr(0, end);
    bytes.remove_prefix(std::min(end + 1, bytes.size()));
    if (text.size() > kLongestLine) {
      return LineError(path, line,
                       absl::StrCat("has ", text.size(), " bytes; up to ", kLongestLine,
                                    " are supported: cut the document"));
    }
    if (IsBlank(text)) continue;
    ZS_ASSIGN_OR_RETURN(Document document, ParseLine(path, line, text));
    ZS_RETURN_IF_ERROR(each(std::move(document)));
  }
  return absl::OkStatus();
}

absl::Status ForEachDocument(const std::string& path, absl::string_view bytes, TextFormat format,
                             const std::function<absl::Status(Document&&)>& each) {
  bytes = WithoutByteOrderMark(bytes);
  if (format == TextFormat::kJsonLines) return ForEachJsonLine(path, bytes, 1, each);
  return each(Document{"", std::string(bytes), 0});
}

}  // namespace zeroshard
