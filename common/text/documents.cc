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

// Reads as far as JSON goes and notes whether it is an object with a document's field.
class DocumentFinder : public nlohmann::json_sax<Json> {
 public:
  bool found() const { return found_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return ++depth_ <= kMaxJsonDepth; }
  bool start_array(size_t) override { return ++depth_ <= kMaxJsonDepth; }
  bool end_object() override { return --depth_ >= 0; }
  bool end_array() override { return --depth_ >= 0; }
  bool key(string_t& name) override {
    found_ = found_ || (depth_ == 1 && (name == "text" || name == "prompt"));
    return true;
  }
  bool parse_error(size_t, const std::string&, const Json::exception&) override { return false; }

 private:
  int depth_ = 0;
  bool found_ = false;
};

// Whether the first line that is not empty is a document of JSON lines, or the beginning of one
// where it goes on beyond `start`, which is all there is of the file if `whole`.
bool StartsWithJsonLine(absl::string_view start, bool whole) {
  while (!start.empty()) {
    const size_t end = std::min(start.find('\n'), start.size());
    const absl::string_view line = start.substr(0, end);
    const bool complete = whole || end < start.size();
    start.remove_prefix(std::min(end + 1, start.size()));
    if (IsBlank(line)) continue;
    DocumentFinder finder;
    const bool parsed = Json::sax_parse(line.begin(), line.end(), &finder);
    return finder.found() && (parsed || !complete);
  }
  return false;
}

struct Magic {
  absl::string_view bytes;
  absl::string_view what;
  absl::string_view instead;
};
constexpr absl::string_view kAsTokens = "name it in data.train with data.tokenizer: tokens";
constexpr absl::string_view kUnpack = "unpack or convert it to text or JSON lines";
// Little-endian numbers, and what the formats' specifications name.
constexpr Magic kMagics[] = {
    {"\x88\xD8\x34\x01", "an llm.c token file (magic 20240520)", kAsTokens},
    {"\xA1\xD9\x34\x01", "an llm.c token file (magic 20240801)", kAsTokens},
    {absl::string_view("MMIDIDX\0\0", 9), "a Megatron index", "name its .bin file instead"},
    {"\x1F\x8B\x08", "compressed by gzip", kUnpack},
    {"\x28\xB5\x2F\xFD", "compressed by zstd", kUnpack},
    {absl::string_view("\xFD\x37zXZ\0", 6), "compressed by xz", kUnpack},
    {"PK\x03\x04", "a zip archive", kUnpack},
    {"PAR1\x15", "a Parquet file", kUnpack},
};

absl::Status CheckLooksLikeText(const std::string& path, absl::string_view start) {
  const bool whole = start.size() <= kFormatBytes;
  start = start.substr(0, kFormatBytes);
  const auto refuse = [&path](absl::string_view seen, absl::string_view instead) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", seen, "; ", instead,
                     ", or, to read it as text all the same, write data.format (--format) text"));
  };
  for (const Magic& magic : kMagics) {
    if (!absl::StartsWith(start, magic.bytes)) continue;
    return refuse(absl::StrCat("begins as ", magic.what, " does, and would be read as text"),
                  magic.instead);
  }
  // Texts may hold some; numbers and characters of two or four bytes hold many.
  constexpr size_t kFewNuls = 32;
  const auto nuls = static_cast<size_t>(std::count(start.begin(), start.end(), '\0'));
  if (nuls > kFewNuls && nuls * 10 > start.size()) {
    return refuse(
        absl::StrCat(nuls, " of its first ", start.size(),
                     " bytes are NUL, and it would be read as text"),
        "if it holds token ids, name it in data.train with data.tokenizer: tokens; if it is "
        "UTF-16, convert it to UTF-8");
  }
  if (StartsWithJsonLine(WithoutByteOrderMark(start), whole)) {
    return refuse(
        "its first line is a JSON object with the field text or prompt, and it would be read as "
        "one "
        "text, because its name ends neither in .jsonl nor in .ndjson",
        "for a document a line write data.format (--format) jsonl");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TextFormat> TextFormatOf(const std::string& path, absl::string_view format,
                                        absl::string_view start) {
  if (format == "text") return TextFormat::kText;
  if (format == "jsonl") return TextFormat::kJsonLines;
  if (!format.empty() && format != "auto") {
    return absl::InvalidArgumentError(
        absl::StrCat("no text format ", format, " (", path, "); there are auto, text and jsonl"));
  }
  if (absl::EndsWithIgnoreCase(path, ".jsonl") || absl::EndsWithIgnoreCase(path, ".ndjson")) {
    return TextFormat::kJsonLines;
  }
  ZS_RETURN_IF_ERROR(CheckLooksLikeText(path, start));
  return TextFormat::kText;
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
