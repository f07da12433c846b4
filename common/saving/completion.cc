#include "common/saving/completion.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/reader.h"
#include "common/files.h"
#include "common/hf/export.h"
#include "common/plan/offload.h"
#include "common/spec/job_spec.h"
#include "common/status_macros.h"
#include "common/tokenizer/tokenizer.h"

namespace zeroshard {
namespace {

bool WantsWeights(const v1::JobSpec& spec) {
  return spec.zero_optimization().stage3_gather_16bit_weights_on_model_save();
}

// From the files just written, which this process sees all of: no rank or store holds the model.
absl::Status ExportWeights(const SaveContents& contents, const SaveExtras& extras,
                           const std::function<void()>& on_progress,
                           const std::function<bool()>& stopped, Manifest* manifest) {
  const std::string& folder = contents.folder;
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                      CheckpointReader::OpenCollected(folder, *manifest));
  HfExportOptions options;
  options.dtype = contents.spec.fp16().enabled() ? DType::kF16 : DType::kBF16;
  if (!extras.assets.empty()) options.assets = absl::StrCat(folder, "/assets");
  options.end_of_text = extras.end_of_text;
  options.stopped = stopped;
  options.progress = [&](uint64_t, uint64_t) {
    if (on_progress) on_progress();
  };
  const std::string model = absl::StrCat(folder, "/model");
  ZS_RETURN_IF_ERROR(
      ExportHfFolder(contents.spec.model(), *reader->Source(StateKind::kMaster), model, options));
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(model, error), end; !error && it != end;
       it.increment(error)) {
    names.push_back(absl::StrCat("model/", it->path().filename().string()));
  }
  if (error) return ErrnoError(error.value(), "list", model);
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    ZS_ASSIGN_OR_RETURN(CheckpointFile file, DescribeFile(folder, name, [&](uint64_t) {
                          if (on_progress) on_progress();
                        }));
    manifest->files.push_back(std::move(file));
  }
  return absl::OkStatus();
}

}  // namespace

std::string FindModelFolder(const v1::JobSpec& spec, const std::string& resume_from) {
  std::error_code error;
  std::string kept = absl::StrCat(resume_from, "/assets");
  if (!resume_from.empty() && std::filesystem::is_directory(kept, error)) return kept;
  return spec.model().init_from();
}

std::map<std::string, std::string> FindAssets(const v1::JobSpec& spec,
                                              const std::string& resume_from) {
  std::map<std::string, std::string> by_name;
  if (const std::string folder = FindModelFolder(spec, resume_from); !folder.empty())
    for (const std::string& name : ListHfAssets(folder))
      by_name[name] = absl::StrCat(folder, "/", name);
  const std::string& tokenizer = spec.data().tokenizer();
  const std::vector<HfAsset> own = TokenizerAssets(tokenizer);
  if (tokenizer == "bytes" || !own.empty())
    std::erase_if(by_name, [](const auto& asset) { return IsTokenizerAsset(asset.first); });
  for (const HfAsset& asset : own) by_name[asset.name] = asset.source;
  return by_name;
}

absl::StatusOr<SaveExtras> ReadSaveExtras(const v1::JobSpec& spec,
                                          const std::map<std::string, std::string>& assets) {
  SaveExtras extras;
  ZS_ASSIGN_OR_RETURN(extras.assets, ReadAssets(assets));
  if (!WantsWeights(spec)) return extras;
  // As `export` finds it.
  const v1::DataSpec& data = spec.data();
  if (data.packing().has_separator()) {
    extras.end_of_text = static_cast<int32_t>(data.packing().separator());
  } else if (IsTokenizerPath(data.tokenizer())) {
    ZS_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Load(data.tokenizer()));
    extras.end_of_text = tokenizer->end_of_text();
  }
  return extras;
}

absl::StatusOr<CompletedSave> CompleteSave(FileSystem* files, CheckpointStore* store,
                                           const SaveContents& contents, const SaveExtras& extras,
                                           const std::function<void()>& on_progress,
                                           const std::function<bool()>& stopped) {
  Manifest manifest;
  manifest.run_id = contents.run_id;
  manifest.job = contents.job;
  manifest.step = contents.step;
  manifest.unix_ms = contents.unix_ms;
  manifest.world_size = static_cast<uint32_t>(contents.parts.size());
  manifest.spec = contents.spec;
  manifest.next_sample = contents.next_sample;
  manifest.samples = contents.samples;
  manifest.loss_scale = contents.loss_scale;
  for (int kind = 0; kind < kStateKinds; ++kind) {
    WeightDigest total;
    for (const SavedPart& part : contents.parts) total.Combine(part.digests[kind]);
    const bool second = static_cast<StateKind>(kind) == StateKind::kExpAvgSq;
    const bool there = kind == 0 || (contents.trained && !(second && UsesSgd(manifest.spec)));
    if (there) manifest.digests[kind] = total.Hex();
  }
  for (const SavedPart& part : contents.parts) manifest.files.push_back(part.file);
  ZS_RETURN_IF_ERROR(WriteAssets(files, extras.assets, contents.folder, &manifest.files));
  if (on_progress) on_progress();
  if (WantsWeights(contents.spec))
    ZS_RETURN_IF_ERROR(ExportWeights(contents, extras, on_progress, stopped, &manifest));
  if (stopped && stopped()) return absl::CancelledError("the save was given up");
  CompletedSave completed;
  for (const CheckpointFile& file : manifest.files) completed.bytes += file.bytes;
  ZS_ASSIGN_OR_RETURN(completed.path, store->Complete(manifest));
  return completed;
}

}  // namespace zeroshard
