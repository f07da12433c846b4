#include "worker/generate/model_files.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/hf/config.h"
#include "common/hf/json.h"
#include "common/hf/weights.h"
#include "common/status_macros.h"
#include "common/strict_json.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// Sequences in training; decoding goes up to the model's positions whatever it says.
constexpr uint32_t kMostSequence = 4096;
constexpr char kAssets[] = "assets";  // of a checkpoint (common/checkpoint/manifest.h)
constexpr size_t kMostTokenizerBytes = size_t{256} << 20;

bool Exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// The ids of `eos_token_id` in a config file: a number or a list of them. Empty where there is no
// such file or field.
absl::StatusOr<std::set<int32_t>> EndTokens(const std::string& path, int64_t vocab) {
  std::set<int32_t> ends;
  if (!Exists(path)) return ends;
  ZS_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
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

// The tokenizer, and what it and the config files in `folder` say about both ends of a text.
absl::Status LoadTokenizer(const std::string& name, const std::string& folder, ModelFiles* files) {
  const absl::StatusOr<std::shared_ptr<const Tokenizer>> tokenizer = Tokenizer::Load(name);
  if (!tokenizer.ok()) {
    return absl::Status(
        tokenizer.status().code(),
        absl::StrCat(tokenizer.status().message(), "; another one can be named with --tokenizer"));
  }
  files->tokenizer = *tokenizer;
  if (name != "bytes") {
    std::error_code ignored;
    const std::string json = fs::is_directory(name, ignored) ? name + "/tokenizer.json" : name;
    ZS_ASSIGN_OR_RETURN(const std::string text, ReadFile(json, kMostTokenizerBytes));
    ZS_ASSIGN_OR_RETURN(files->prefix, PrefixOf(text, *files->tokenizer, json));
  }
  for (const char* config : {"generation_config.json", "config.json"}) {
    if (!files->end_of_text.empty()) break;
    ZS_ASSIGN_OR_RETURN(files->end_of_text,
                        EndTokens(absl::StrCat(folder, "/", config), files->table.config.vocab));
  }
  const std::optional<int32_t> end = files->tokenizer->end_of_text();
  if (files->end_of_text.empty() && end.has_value()) files->end_of_text.insert(*end);
  return absl::OkStatus();
}

absl::StatusOr<ModelFiles> OpenFolder(const std::string& path, const std::string& tokenizer) {
  ModelFiles files;
  files.path = path;
  ZS_ASSIGN_OR_RETURN(HfConfig config, ReadHfConfig(path));
  config.model.set_sequence_length(std::min(config.model.max_position_embeddings(), kMostSequence));
  ZS_ASSIGN_OR_RETURN(files.table, MakeModelTable(config.model));
  files.warnings = std::move(config.warnings);
  ZS_ASSIGN_OR_RETURN(files.weights, HfWeights::Open(path, files.table, &files.warnings));
  ZS_RETURN_IF_ERROR(LoadTokenizer(tokenizer.empty() ? path : tokenizer, path, &files));
  return files;
}

absl::StatusOr<std::string> TokenizerOf(const Manifest& manifest, const std::string& path) {
  const std::string assets = absl::StrCat(path, "/", kAssets);
  if (Exists(assets + "/tokenizer.json")) return assets;
  const std::string& name = manifest.spec.data().tokenizer();
  if (!name.empty() && name != "tokens") return name;
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": job ", manifest.job,
                   " was trained on token files, and no tokenizer came with its model; name the "
                   "one that made the files with --tokenizer"));
}

absl::StatusOr<ModelFiles> OpenCheckpoint(const std::string& path, const std::string& tokenizer) {
  ModelFiles files;
  ZS_ASSIGN_OR_RETURN(FoundCheckpoint found, FindCheckpoint(path));
  files.path = found.path;
  files.warnings = std::move(found.skipped);
  ZS_ASSIGN_OR_RETURN(files.checkpoint, CheckpointReader::Open(found.path));
  const v1::JobSpec& spec = files.checkpoint->manifest().spec;
  ZS_ASSIGN_OR_RETURN(files.table, MakeModelTable(spec.model()));
  ZS_RETURN_IF_ERROR(files.checkpoint->CheckModel(files.table, /*moments=*/false));
  ZS_RETURN_IF_ERROR(files.checkpoint->VerifyFiles(0, 1));
  files.weights = files.checkpoint->Source(StateKind::kMaster);
  std::string name = tokenizer;
  if (name.empty()) {
    ZS_ASSIGN_OR_RETURN(name, TokenizerOf(files.checkpoint->manifest(), found.path));
  }
  ZS_RETURN_IF_ERROR(LoadTokenizer(name, absl::StrCat(found.path, "/", kAssets), &files));
  if (spec.data().packing().has_separator()) {
    files.end_of_text.insert(static_cast<int32_t>(spec.data().packing().separator()));
  }
  return files;
}

}  // namespace

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

absl::StatusOr<ModelFiles> OpenModelFiles(const std::string& path, const std::string& tokenizer) {
  if (!Exists(path)) {
    return absl::NotFoundError(
        absl::StrCat("--model: there is no folder ", path,
                     "; wanted a Hugging Face folder (config.json beside it) or a checkpoint"));
  }
  if (Exists(path + "/config.json") && !Exists(path + "/manifest.json")) {
    return OpenFolder(path, tokenizer);
  }
  return OpenCheckpoint(path, tokenizer);
}

}  // namespace zeroshard
