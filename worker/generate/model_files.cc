#include "worker/generate/model_files.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/hf/config.h"
#include "common/hf/weights.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

// Sequences in training; decoding goes up to the model's positions whatever it says.
constexpr uint32_t kMostSequence = 4096;
constexpr char kAssets[] = "assets";  // of a checkpoint (common/checkpoint/manifest.h)

bool Exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// The tokenizer, and what it and the config files in `folder` say about both ends of a text; `data`
// as for ReadTextEnds.
absl::Status LoadTokenizer(const std::string& name, const std::string& folder,
                           const v1::DataSpec* data, ModelFiles* files) {
  const absl::StatusOr<std::shared_ptr<const Tokenizer>> tokenizer = Tokenizer::Load(name);
  if (!tokenizer.ok()) {
    return absl::Status(
        tokenizer.status().code(),
        absl::StrCat(tokenizer.status().message(), "; another one can be named with --tokenizer"));
  }
  files->tokenizer = *tokenizer;
  ZS_ASSIGN_OR_RETURN(
      files->ends, ReadTextEnds(name, *files->tokenizer, folder, data, files->table.config.vocab));
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
  ZS_RETURN_IF_ERROR(LoadTokenizer(tokenizer.empty() ? path : tokenizer, path, nullptr, &files));
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
  ZS_RETURN_IF_ERROR(
      LoadTokenizer(name, absl::StrCat(found.path, "/", kAssets), &spec.data(), &files));
  return files;
}

}  // namespace

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
