#include "worker/generate/text_ends.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/hf/json.h"
#include "common/status_macros.h"
#include "common/strict_json.h"
#include "worker/generate/generator.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostTokenizerBytes = size_t{256} << 20;

// The ids of `eos_token_id` in a config file: a number or a list of them. Empty where there is no
// such file or field.
absl::StatusOr<std::set<int32_t>> EndTokens(const std::string& path, int64_t vocab) {
  std::set<int32_t> ends;
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return ends;
  ZS_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  using Json = nlohmann::ordered_json;
  ZS_ASSIGN_OR_RETURN(const Json object, ParseJsonObject(text, path));
  const auto field = object.find("eos_token_id");
  if (field == object.end() || field->is_null()) return ends;
  for (const Json& id : field->is_array() ? *field : Json::array({*field})) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(vocab)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": eos_token_id is ", field->dump(),
                                                     "; wanted ids below vocab_size, ", vocab));
    }
    ends.insert(id.get<int32_t>());
  }
  return ends;
}

}  // namespace

absl::StatusOr<TextEnds> ReadTextEnds(const std::string& name, const Tokenizer& tokenizer,
                                      const std::string& folder, const v1::DataSpec* data,
                                      int64_t vocab) {
  TextEnds ends;
  if (name != "bytes" && name != "tokens") {
    std::error_code ignored;
    const std::string json = fs::is_directory(name, ignored) ? name + "/tokenizer.json" : name;
    ZS_ASSIGN_OR_RETURN(const std::string text, ReadFile(json, kMostTokenizerBytes));
    ZS_ASSIGN_OR_RETURN(ends.prefix, PrefixOf(text, tokenizer, json));
  }
  for (const char* config : {"generation_config.json", "config.json"}) {
    if (!ends.end_of_text.empty() || folder.empty()) break;
    ZS_ASSIGN_OR_RETURN(ends.end_of_text, EndTokens(absl::StrCat(folder, "/", config), vocab));
  }
  const std::optional<int32_t> end = tokenizer.end_of_text();
  if (ends.end_of_text.empty() && end.has_value()) ends.end_of_text.insert(*end);
  if (data != nullptr && data->packing().has_separator())
    ends.end_of_text.insert(static_cast<int32_t>(data->packing().separator()));
  return ends;
}

absl::StatusOr<std::vector<int32_t>> PrefixOf(absl::string_view tokenizer_json,
                                              const Tokenizer& tokenizer,
                                              const std::string& where) {
  std::vector<int32_t> prefix;
  using Json = nlohmann::json;  // vocabularies are too large to keep in order
  const auto wrong = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": post_processor: ", what));
  };
  const absl::StatusOr<Json> json = ParseStrictJson<Json>(tokenizer_json);
  if (!json.ok()) return wrong(json.status().message());
  if (!json->is_object()) return wrong("the file is no JSON object");
  const auto member = [](const Json& object, const char* name) {
    const auto field = object.is_object() ? object.find(name) : object.end();
    return field == object.end() ? Json() : *field;
  };
  const Json processor = member(*json, "post_processor");
  Json parts = Json::array({processor});
  if (member(processor, "type") == "Sequence") parts = member(processor, "processors");
  for (const Json& part : parts) {
    if (member(part, "type") != "TemplateProcessing") continue;
    for (const Json& item : member(part, "single")) {
      const Json token = member(member(item, "SpecialToken"), "id");
      if (!token.is_string()) break;  // the text; what follows it is for training
      const std::optional<int32_t> id = tokenizer.Find(token.get<std::string>());
      if (!id.has_value()) {
        return wrong(absl::StrCat("the token ", token.dump(), " is not in the vocabulary"));
      }
      prefix.push_back(*id);
    }
  }
  return prefix;
}

absl::StatusOr<ContinuationOptions> MakePrompt(const std::string& what, absl::string_view text,
                                               const Tokenizer& tokenizer, const TextEnds& ends,
                                               const ModelConfig& model) {
  ContinuationOptions prompt;
  prompt.prompt = ends.prefix;
  prompt.end_of_text = ends.end_of_text;
  tokenizer.Encode(text, &prompt.prompt);
  if (prompt.prompt.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        what,
        " is empty, and this model has no token that begins a text: give it a word to go on "
        "from"));
  }
  const int64_t positions = Generator::Positions(model);
  if (static_cast<int64_t>(prompt.prompt.size()) > positions) {
    return absl::InvalidArgumentError(absl::StrCat(what, " has ", prompt.prompt.size(),
                                                   " tokens, but the model has ", positions,
                                                   " positions: shorten it"));
  }
  for (const int32_t token : prompt.prompt) {
    if (token < model.vocab) continue;
    return absl::InvalidArgumentError(absl::StrCat(what, " has the token ", token,
                                                   ", and the model a vocabulary of ", model.vocab,
                                                   ": is the tokenizer the model's?"));
  }
  return prompt;
}

}  // namespace zeroshard
