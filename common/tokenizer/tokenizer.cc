#include "common/tokenizer/tokenizer.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/status_macros.h"
#include "common/strict_json.h"
#include "common/tokenizer/bpe_tokenizer.h"
#include "common/tokenizer/byte_tokenizer.h"
#include "common/tokenizer/tokenizer_json.h"

namespace zeroshard {
namespace {

using Json = nlohmann::json;

// Ten times the largest that is in use.
constexpr size_t kLargestFile = 256 << 20;

absl::StatusOr<std::optional<Json>> ReadJsonIfThere(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, kLargestFile);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  if (!text.ok()) return text.status();
  absl::StatusOr<Json> json = ParseStrictJson<Json>(*text);
  if (!json.ok()) {
    return absl::Status(json.status().code(),
                        absl::StrCat(path, ": ", json.status().message(), "; is the file whole?"));
  }
  if (!json->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": it is a JSON ", json->type_name(), "; wanted an object"));
  }
  return *std::move(json);
}

// The id of the token that tokenizer_config.json names, or the first of those that config.json
// does, or the one that is called as published tokenizers call it.
absl::StatusOr<std::optional<int32_t>> EndOfText(const std::string& folder,
                                                 const TokenTable& table) {
  const std::string named_in = folder + "/tokenizer_config.json";
  ZS_ASSIGN_OR_RETURN(const std::optional<Json> names, ReadJsonIfThere(named_in));
  if (names.has_value() && names->contains("eos_token") && !(*names)["eos_token"].is_null()) {
    const Json& token = (*names)["eos_token"];
    const Json& text = token.is_object() && token.contains("content") ? token["content"] : token;
    const std::optional<int32_t> id =
        text.is_string() ? table.Find(text.get<std::string>()) : std::nullopt;
    if (!id.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          named_in, ": eos_token is ", token.dump(-1, ' ', false, Json::error_handler_t::replace),
          ", which tokenizer.json does not hold"));
    }
    return id;
  }
  const std::string numbered_in = folder + "/config.json";
  ZS_ASSIGN_OR_RETURN(const std::optional<Json> ids, ReadJsonIfThere(numbered_in));
  if (ids.has_value() && ids->contains("eos_token_id") && !(*ids)["eos_token_id"].is_null()) {
    const Json& value = (*ids)["eos_token_id"];
    const Json& id = value.is_array() && !value.empty() ? value[0] : value;
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(table.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat(numbered_in, ": eos_token_id is ",
                       value.dump(-1, ' ', false, Json::error_handler_t::replace), "; an id below ",
                       table.size(), ", or a list of them, is wanted"));
    }
    return static_cast<int32_t>(id.get<uint64_t>());
  }
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>"}) {
    const std::optional<int32_t> id = table.Find(name);
    if (id.has_value() && table.kind(*id) != TokenTable::Kind::kVocabulary) return id;
  }
  return std::nullopt;
}

absl::StatusOr<std::shared_ptr<const Tokenizer>> LoadFile(const std::string& path,
                                                          const std::string& folder) {
  absl::StatusOr<std::string> json = ReadFile(path, kLargestFile);
  if (!json.ok()) {
    return absl::Status(json.status().code(),
                        absl::StrCat("no tokenizer: ", json.status().message(),
                                     "; a tokenizer is bytes, a tokenizer.json, or a folder that "
                                     "holds one"));
  }
  ZS_ASSIGN_OR_RETURN(TokenizerParts parts, ParseTokenizerJson(path, *json));
  ZS_ASSIGN_OR_RETURN(const std::optional<int32_t> end, EndOfText(folder, parts.table));
  return std::make_shared<const BpeTokenizer>(std::move(parts), end);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Tokenizer>> Tokenizer::Load(const std::string& name) {
  if (name == "bytes") return std::make_shared<const ByteTokenizer>();
  try {
    if (std::filesystem::is_directory(name)) return LoadFile(name + "/tokenizer.json", name);
    const std::filesystem::path folder = std::filesystem::path(name).parent_path();
    return LoadFile(name, folder.empty() ? "." : folder.string());
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("tokenizer ", name, ": ", error.what()));
  }
}

}  // namespace zeroshard
