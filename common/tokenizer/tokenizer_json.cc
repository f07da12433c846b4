#include "common/tokenizer/tokenizer_json.h"

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/status_macros.h"
#include "common/strict_json.h"
#include "common/tokenizer/byte_level.h"

namespace zeroshard {
namespace {

using Json = nlohmann::json;

// A token is matched byte by byte at every place of the text where it may start.
constexpr size_t kLongestAddedToken = 4096;

// A value as a message shows it.
std::string Show(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  constexpr size_t kMost = 120;
  if (text.size() > kMost) text = absl::StrCat(text.substr(0, kMost), "...");
  return text;
}

class Parser {
 public:
  explicit Parser(const std::string& path) : path_(path) {}

  absl::StatusOr<TokenizerParts> Parse(absl::string_view text) {
    const absl::StatusOr<Json> parsed = ParseStrictJson<Json>(text);
    if (!parsed.ok()) {
      return Refuse("", absl::StrCat(parsed.status().message(), "; is the file whole?"));
    }
    const Json& root = *parsed;
    if (!root.is_object()) {
      return Refuse("", absl::StrCat("is a JSON ", root.type_name(), "; wanted an object"));
    }
    ZS_RETURN_IF_ERROR(
        CheckFields(root, "",
                    {"version", "truncation", "padding", "added_tokens", "normalizer",
                     "pre_tokenizer", "post_processor", "decoder", "model"}));
    for (const char* field : {"truncation", "padding"}) {
      if (const Json* value = Get(root, field); value != nullptr) {
        return Refuse(field, absl::StrCat("is ", Show(*value),
                                          ": texts are encoded whole and as they are; set it to "
                                          "null in the file"));
      }
    }
    ZS_RETURN_IF_ERROR(Normalizer(Get(root, "normalizer"), "normalizer", /*nested=*/false));
    ZS_RETURN_IF_ERROR(PreTokenizers(Get(root, "pre_tokenizer")));
    ZS_RETURN_IF_ERROR(PostProcessor(Get(root, "post_processor"), "post_processor", false));
    ZS_RETURN_IF_ERROR(Decoder(Get(root, "decoder")));
    const Json* model = Get(root, "model");
    if (model == nullptr || !model->is_object()) return Refuse("model", "is missing");
    ZS_RETURN_IF_ERROR(Model(*model));
    ZS_RETURN_IF_ERROR(AddedTokens(Get(root, "added_tokens")));
    return std::move(parts_);
  }

 private:
  absl::Status Refuse(absl::string_view field, absl::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": ", field, field.empty() ? "" : " ", what));
  }

  // The field; null where it is missing or null.
  static const Json* Get(const Json& object, const char* field) {
    if (!object.is_object()) return nullptr;
    const auto found = object.find(field);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }

  absl::Status CheckFields(const Json& object, const std::string& where,
                           std::initializer_list<absl::string_view> known) const {
    for (const auto& [key, value] : object.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      return Refuse(absl::StrCat(where, where.empty() ? "" : ".", key),
                    absl::StrCat("is not known (", absl::StrJoin(known, ", "),
                                 " are): it could change token ids"));
    }
    return absl::OkStatus();
  }

  // A boolean of `object`; `missing` where it is not there.
  absl::StatusOr<bool> Flag(const Json& object, const std::string& where, const char* field,
                            std::optional<bool> missing) const {
    const auto found = object.find(field);
    if (found == object.end() && missing.has_value()) return *missing;
    if (found == object.end() || !found->is_boolean()) {
      return Refuse(absl::StrCat(where, ".", field),
                    found == object.end()
                        ? "is missing; true or false is wanted"
                        : absl::StrCat("is ", Show(*found), "; true or false is wanted"));
    }
    return found->get<bool>();
  }

  absl::StatusOr<std::string> Type(const Json& object, const std::string& where) const {
    const Json* type = Get(object, "type");
    if (type == nullptr || !type->is_string()) {
      return Refuse(where, absl::StrCat("has no type: ", Show(object)));
    }
    return type->get<std::string>();
  }

  // The parts of a Sequence.
  absl::StatusOr<const Json*> List(const Json& object, const std::string& where,
                                   const char* field) const {
    const Json* list = Get(object, field);
    if (list == nullptr || !list->is_array()) {
      return Refuse(absl::StrCat(where, ".", field), "is missing, or no list");
    }
    return list;
  }

  absl::Status Normalizer(const Json* json, const std::string& where, bool nested) {
    if (json == nullptr) return absl::OkStatus();
    ZS_ASSIGN_OR_RETURN(const std::string type, Type(*json, where));
    if (type == "NFC") {
      parts_.nfc = true;
      return CheckFields(*json, where, {"type"});
    }
    if (type == "Sequence" && !nested) {
      ZS_RETURN_IF_ERROR(CheckFields(*json, where, {"type", "normalizers"}));
      ZS_ASSIGN_OR_RETURN(const Json* list, List(*json, where, "normalizers"));
      for (const Json& part : *list) {
        ZS_RETURN_IF_ERROR(Normalizer(&part, absl::StrCat(where, ".normalizers"), true));
      }
      return absl::OkStatus();
    }
    return Refuse(absl::StrCat(where, ".type"),
                  absl::StrCat("is ", type, "; null, NFC and a Sequence of NFC are supported"));
  }

  absl::Status PreTokenizers(const Json* json) {
    const std::string where = "pre_tokenizer";
    if (json == nullptr) {
      return Refuse(where, "is missing; one that ends in ByteLevel is supported");
    }
    ZS_ASSIGN_OR_RETURN(const std::string type, Type(*json, where));
    if (type != "Sequence") {
      ZS_RETURN_IF_ERROR(PreTokenizerStep(*json, type, where));
    } else {
      ZS_RETURN_IF_ERROR(CheckFields(*json, where, {"type", "pretokenizers"}));
      ZS_ASSIGN_OR_RETURN(const Json* list, List(*json, where, "pretokenizers"));
      for (size_t i = 0; i < list->size(); ++i) {
        const std::string here = absl::StrCat(where, ".pretokenizers[", i, "]");
        ZS_ASSIGN_OR_RETURN(const std::string part, Type((*list)[i], here));
        ZS_RETURN_IF_ERROR(PreTokenizerStep((*list)[i], part, here));
      }
    }
    if (byte_level_) return absl::OkStatus();
    return Refuse(where, absl::StrCat("does not end in ByteLevel: ", Show(*json),
                                      "; only byte-level vocabularies are supported"));
  }

  absl::Status PreTokenizerStep(const Json& json, const std::string& type,
                                const std::string& where) {
    using Kind = PreTokenizer::Step::Kind;
    if (byte_level_) return Refuse(where, absl::StrCat("is ", type, " after ByteLevel"));
    if (type == "ByteLevel") {
      byte_level_ = true;
      ZS_RETURN_IF_ERROR(
          CheckFields(json, where, {"type", "add_prefix_space", "trim_offsets", "use_regex"}));
      ZS_ASSIGN_OR_RETURN(const bool space, Flag(json, where, "add_prefix_space", std::nullopt));
      ZS_ASSIGN_OR_RETURN(const bool regex, Flag(json, where, "use_regex", true));
      if (space) parts_.steps.push_back({Kind::kSpace, nullptr});
      if (regex) {
        ZS_ASSIGN_OR_RETURN(auto pattern, WordPattern::Make(WordPattern::kGpt2));
        parts_.steps.push_back({Kind::kPattern, std::move(pattern)});
      }
      return absl::OkStatus();
    }
    if (type == "Digits") {
      ZS_RETURN_IF_ERROR(CheckFields(json, where, {"type", "individual_digits"}));
      ZS_ASSIGN_OR_RETURN(const bool alone, Flag(json, where, "individual_digits", std::nullopt));
      parts_.steps.push_back({alone ? Kind::kDigits : Kind::kContiguousDigits, nullptr});
      return absl::OkStatus();
    }
    if (type == "Split") {
      ZS_RETURN_IF_ERROR(CheckFields(json, where, {"type", "pattern", "behavior", "invert"}));
      ZS_ASSIGN_OR_RETURN(const bool invert, Flag(json, where, "invert", std::nullopt));
      const Json* behavior = Get(json, "behavior");
      if (invert || behavior == nullptr || *behavior != "Isolated") {
        return Refuse(
            where, absl::StrCat("has the behavior ", behavior == nullptr ? "null" : Show(*behavior),
                                " and invert ", invert ? "true" : "false",
                                "; Isolated and false are supported"));
      }
      const Json* pattern = Get(json, "pattern");
      const Json* regex = pattern == nullptr ? nullptr : Get(*pattern, "Regex");
      if (regex == nullptr || !regex->is_string()) {
        return Refuse(absl::StrCat(where, ".pattern"),
                      absl::StrCat("is ", pattern == nullptr ? "null" : Show(*pattern),
                                   "; {\"Regex\": ...} is supported"));
      }
      auto made = WordPattern::Make(regex->get_ref<const std::string&>());
      if (!made.ok()) return Refuse(absl::StrCat(where, ".pattern:"), made.status().message());
      parts_.steps.push_back({Kind::kPattern, *std::move(made)});
      return absl::OkStatus();
    }
    return Refuse(absl::StrCat(where, ".type"),
                  absl::StrCat("is ", type,
                               "; ByteLevel, Split, Digits and a Sequence of them are supported"));
  }

  // These add special tokens, which is not asked for, or tell where tokens are in the text.
  absl::Status PostProcessor(const Json* json, const std::string& where, bool nested) const {
    if (json == nullptr) return absl::OkStatus();
    ZS_ASSIGN_OR_RETURN(const std::string type, Type(*json, where));
    if (type == "ByteLevel" || type == "TemplateProcessing" || type == "RobertaProcessing") {
      return absl::OkStatus();
    }
    if (type == "Sequence" && !nested) {
      ZS_ASSIGN_OR_RETURN(const Json* list, List(*json, where, "processors"));
      for (const Json& part : *list) {
        ZS_RETURN_IF_ERROR(PostProcessor(&part, absl::StrCat(where, ".processors"), true));
      }
      return absl::OkStatus();
    }
    return Refuse(absl::StrCat(where, ".type"),
                  absl::StrCat("is ", type,
                               "; null, ByteLevel, TemplateProcessing, RobertaProcessing and a "
                               "Sequence of them are supported"));
  }

  absl::Status Decoder(const Json* json) const {
    if (json == nullptr) return Refuse("decoder", "is missing; ByteLevel is supported");
    ZS_ASSIGN_OR_RETURN(const std::string type, Type(*json, "decoder"));
    if (type == "ByteLevel") return absl::OkStatus();
    return Refuse("decoder.type", absl::StrCat("is ", type, "; ByteLevel is supported"));
  }

  absl::Status Model(const Json& model) {
    const std::string where = "model";
    // Old files have no type.
    if (const Json* type = Get(model, "type"); type != nullptr && *type != "BPE") {
      return Refuse("model.type",
                    absl::StrCat("is ", Show(*type), "; BPE over bytes is supported"));
    }
    ZS_RETURN_IF_ERROR(CheckFields(
        model, where,
        {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
         "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"}));
    if (const Json* dropout = Get(model, "dropout"); dropout != nullptr && *dropout != 0) {
      return Refuse("model.dropout", absl::StrCat("is ", Show(*dropout),
                                                  ": ids would be random; null is supported"));
    }
    for (const char* field : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (const Json* value = Get(model, field); value != nullptr && *value != "") {
        return Refuse(absl::StrCat("model.", field),
                      absl::StrCat("is ", Show(*value), "; null is supported"));
      }
    }
    ZS_ASSIGN_OR_RETURN(const bool fallback, Flag(model, where, "byte_fallback", false));
    if (fallback) {
      return Refuse("model.byte_fallback",
                    "is true: this is no byte-level vocabulary; false is supported");
    }
    ZS_ASSIGN_OR_RETURN(ignore_merges_, Flag(model, where, "ignore_merges", false));
    ZS_RETURN_IF_ERROR(Vocabulary(Get(model, "vocab")));
    const Json* unknown = Get(model, "unk_token");
    if (unknown != nullptr && *unknown != "" && bytes_known_ < 256) {
      return Refuse(
          "model.unk_token",
          absl::StrCat("is ", Show(*unknown), " and the vocabulary has only ", bytes_known_,
                       " of the 256 bytes; null, or a vocabulary with every byte, is "
                       "supported"));
    }
    return Merges(Get(model, "merges"));
  }

  absl::Status Vocabulary(const Json* json) {
    if (json == nullptr || !json->is_object()) {
      return Refuse("model.vocab", "is missing, or no object of tokens and their ids");
    }
    std::string bytes;
    vocabulary_.reserve(json->size());
    for (const auto& [token, value] : json->items()) {
      if (!value.is_number_unsigned() || value.get<uint64_t>() > TokenTable::kLargestId) {
        return Refuse("model.vocab",
                      absl::StrCat("gives ", Show(token), " the id ", Show(value), "; 0 to ",
                                   TokenTable::kLargestId, " is supported"));
      }
      const auto id = static_cast<int32_t>(value.get<uint64_t>());
      if (parts_.table.kind(id) != TokenTable::Kind::kNone) {
        return Refuse("model.vocab", absl::StrCat("gives the id ", id, " to ", Show(token),
                                                  " and to another token"));
      }
      // What is not written in the letters of bytes no text is encoded to.
      const bool letters = BytesOfLetters(token, &bytes);
      parts_.table.Set(id, letters ? bytes : token, TokenTable::Kind::kVocabulary);
      vocabulary_.emplace(token, id);
      if (letters && ignore_merges_) parts_.pairs.AddWord(bytes, id);
      if (letters && bytes.size() == 1) {
        parts_.pairs.SetByte(static_cast<uint8_t>(bytes[0]), id);
        ++bytes_known_;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Merges(const Json* json) {
    if (json == nullptr || !json->is_array())
      return Refuse("model.merges", "is missing, or no list");
    parts_.pairs.Reserve(json->size());
    uint32_t rank = 0;
    std::string merged;
    for (size_t i = 0; i < json->size(); ++i) {
      const Json& merge = (*json)[i];
      absl::string_view left;
      absl::string_view right;
      if (merge.is_string()) {
        const absl::string_view text = merge.get_ref<const std::string&>();
        if (absl::StartsWith(text, "#version")) continue;
        const size_t space = text.find(' ');
        if (space == text.npos || text.find(' ', space + 1) != text.npos) return BadMerge(i, merge);
        left = text.substr(0, space);
        right = text.substr(space + 1);
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
                 merge[1].is_string()) {
        left = merge[0].get_ref<const std::string&>();
        right = merge[1].get_ref<const std::string&>();
      } else {
        return BadMerge(i, merge);
      }
      merged = absl::StrCat(left, right);
      const auto left_id = vocabulary_.find(left);
      const auto right_id = vocabulary_.find(right);
      const auto merged_id = vocabulary_.find(merged);
      if (left_id == vocabulary_.end() || right_id == vocabulary_.end() ||
          merged_id == vocabulary_.end()) {
        return Refuse(absl::StrCat("model.merges[", i, "]"),
                      absl::StrCat("is ", Show(merge),
                                   ", but the vocabulary does not hold both and what they make"));
      }
      parts_.pairs.AddMerge(left_id->second, right_id->second, rank++, merged_id->second);
    }
    return absl::OkStatus();
  }

  absl::Status BadMerge(size_t index, const Json& merge) const {
    return Refuse(absl::StrCat("model.merges[", index, "]"),
                  absl::StrCat("is ", Show(merge),
                               "; \"left right\" or [\"left\", \"right\"] is "
                               "wanted"));
  }

  absl::Status AddedTokens(const Json* json) {
    if (json == nullptr) return absl::OkStatus();
    if (!json->is_array()) return Refuse("added_tokens", "is no list");
    // Ids that Hugging Face's tokenizers give to those that the vocabulary lacks.
    int64_t next = static_cast<int64_t>(vocabulary_.size());
    int64_t largest = -1;
    absl::flat_hash_map<std::string, int32_t> seen;
    for (size_t i = 0; i < json->size(); ++i) {
      const Json& entry = (*json)[i];
      const std::string where = absl::StrCat("added_tokens[", i, "]");
      if (!entry.is_object()) return Refuse(where, absl::StrCat("is ", Show(entry)));
      ZS_RETURN_IF_ERROR(CheckFields(
          entry, where,
          {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}));
      const Json* content = Get(entry, "content");
      const Json* id = Get(entry, "id");
      if (content == nullptr || !content->is_string() || id == nullptr ||
          !id->is_number_unsigned()) {
        return Refuse(where, absl::StrCat("is ", Show(entry), "; an id and a content are wanted"));
      }
      AddedToken token;
      token.content = content->get<std::string>();
      if (token.content.empty()) continue;  // never found
      if (token.content.size() > kLongestAddedToken) {
        return Refuse(where, absl::StrCat("has a content of ", token.content.size(),
                                          " bytes; up to ", kLongestAddedToken, " are supported"));
      }
      ZS_ASSIGN_OR_RETURN(token.special, Flag(entry, where, "special", false));
      ZS_ASSIGN_OR_RETURN(token.single_word, Flag(entry, where, "single_word", false));
      ZS_ASSIGN_OR_RETURN(token.lstrip, Flag(entry, where, "lstrip", false));
      ZS_ASSIGN_OR_RETURN(token.rstrip, Flag(entry, where, "rstrip", false));
      ZS_ASSIGN_OR_RETURN(token.normalized, Flag(entry, where, "normalized", !token.special));
      const auto in_vocabulary = vocabulary_.find(token.content);
      const auto before = seen.find(token.content);
      int64_t expected = next;
      if (before != seen.end()) {
        expected = before->second;
      } else if (in_vocabulary != vocabulary_.end()) {
        expected = in_vocabulary->second;
      }
      if (id->get<uint64_t>() != static_cast<uint64_t>(expected) ||
          expected > TokenTable::kLargestId) {
        return Refuse(absl::StrCat(where, ".id"),
                      absl::StrCat("is ", Show(*id), " for ", Show(token.content),
                                   ", but Hugging Face's tokenizers would give it ", expected,
                                   "; make it that, or put the token into model.vocab"));
      }
      token.id = static_cast<int32_t>(expected);
      if (before != seen.end()) {
        return Refuse(where, absl::StrCat("is ", Show(token.content), " a second time"));
      }
      const TokenTable::Kind kind = parts_.table.kind(token.id);
      if (in_vocabulary == vocabulary_.end() && kind != TokenTable::Kind::kNone) {
        return Refuse(absl::StrCat(where, ".id"),
                      absl::StrCat("is ", token.id, " for ", Show(token.content),
                                   ", which is the id of another token"));
      }
      seen.emplace(token.content, token.id);
      largest = std::max<int64_t>(largest, token.id);
      next = std::max<int64_t>(static_cast<int64_t>(vocabulary_.size()), largest + 1);
      parts_.table.Set(token.id, token.content,
                       token.special ? TokenTable::Kind::kSpecial : TokenTable::Kind::kAdded);
      parts_.added_tokens.push_back(std::move(token));
    }
    return absl::OkStatus();
  }

  const std::string path_;
  TokenizerParts parts_;
  absl::flat_hash_map<std::string, int32_t> vocabulary_;  // by the letters of bytes
  int bytes_known_ = 0;
  bool byte_level_ = false;
  bool ignore_merges_ = false;
};

}  // namespace

absl::StatusOr<TokenizerParts> ParseTokenizerJson(const std::string& path, absl::string_view json) {
  return Parser(path).Parse(json);
}

}  // namespace zeroshard
