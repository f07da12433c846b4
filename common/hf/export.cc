#include "common/hf/export.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "common/files.h"
#include "common/hf/config.h"
#include "common/hf/json.h"
#include "common/hf/tensor_map.h"
#include "common/kernels/half.h"
#include "common/safetensors/float_types.h"
#include "common/safetensors/safetensors.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPiece = 1 << 20;  // elements written at once
constexpr absl::string_view kModelFiles[] = {"config.json", "generation_config.json"};
constexpr char kTokenizerJson[] = "tokenizer.json";
constexpr absl::string_view kTokenizerFiles[] = {
    "added_tokens.json", "chat_template.jinja",     "chat_template.json",
    "merges.txt",        "special_tokens_map.json", kTokenizerJson,
    "tokenizer.model",   "tokenizer_config.json",   "vocab.json"};
constexpr size_t kMaxAsset = size_t{256} << 20;  // bytes; the largest tokenizers have some 40 MB

// Those of the names that are files of the folder.
std::vector<std::string> Present(const std::string& folder,
                                 absl::Span<const absl::string_view> names) {
  std::vector<std::string> present;
  for (const absl::string_view name : names) {
    std::error_code error;
    if (fs::is_regular_file(absl::StrCat(folder, "/", name), error)) present.emplace_back(name);
  }
  return present;
}

uint64_t Bytes(const HfTensor& tensor, DType dtype) {
  uint64_t bytes = SizeOf(dtype);
  for (const int64_t extent : tensor.shape) bytes *= static_cast<uint64_t>(extent);
  return bytes;
}

absl::Status SyncFolder(const std::string& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return ErrnoError(errno, "open", folder);
  const absl::Cleanup close_folder = [fd] { close(fd); };
  return fsync(fd) == 0 ? absl::OkStatus() : ErrnoError(errno, "sync", folder);
}

// Runs of tensors whose bytes stay below the limit; one that is larger has a file of its own.
std::vector<std::vector<const HfTensor*>> MakeShards(const std::vector<HfTensor>& tensors,
                                                     DType dtype, uint64_t limit) {
  std::vector<std::vector<const HfTensor*>> shards;
  uint64_t held = 0;
  for (const HfTensor& tensor : tensors) {
    const uint64_t bytes = Bytes(tensor, dtype);
    if (shards.empty() || held + bytes > limit) {
      shards.emplace_back();
      held = 0;
    }
    shards.back().push_back(&tensor);
    held += bytes;
  }
  return shards;
}

std::string ShardName(size_t shard, size_t shards) {
  if (shards == 1) return "model.safetensors";
  return absl::StrFormat("model-%05d-of-%05d.safetensors", shard + 1, shards);
}

class Exporter {
 public:
  Exporter(const ParameterSource& source, const HfExportOptions& options, uint64_t total)
      : source_(source), options_(options), total_(total) {
    values_.reserve(kPiece);
  }

  absl::Status WriteShard(const std::string& path, const std::vector<const HfTensor*>& tensors) {
    std::vector<SafetensorsLayout> layouts;
    for (const HfTensor* t : tensors) layouts.push_back({t->name, options_.dtype, t->shape});
    ZS_ASSIGN_OR_RETURN(writer_, SafetensorsWriter::Create(path, layouts));
    for (const HfTensor* tensor : tensors) {
      ZS_RETURN_IF_ERROR(tensor->transposed ? WriteTransposed(*tensor) : WriteRuns(*tensor));
      source_.DropPages();
    }
    return writer_->Finish();
  }

 private:
  absl::Status WriteRuns(const HfTensor& tensor) {
    for (const ParameterInfo& part : tensor.parts) {
      for (int64_t begin = 0; begin < part.size; begin += kPiece) {
        const int64_t end = std::min(part.size, begin + kPiece);
        values_.resize(static_cast<size_t>(end - begin));
        ZS_RETURN_IF_ERROR(source_.Read(part, begin, end, values_.data()));
        ZS_RETURN_IF_ERROR(Append());
      }
    }
    return absl::OkStatus();
  }

  // Row by row there, which is column by column of ours.
  absl::Status WriteTransposed(const HfTensor& tensor) {
    std::vector<std::unique_ptr<float[]>> ours;
    for (const ParameterInfo& part : tensor.parts) {
      ours.emplace_back(new float[static_cast<size_t>(part.size)]);
      ZS_RETURN_IF_ERROR(source_.Read(part, 0, part.size, ours.back().get()));
    }
    const int64_t rows = tensor.shape[0];
    const int64_t width = tensor.shape[1];
    const int64_t step = std::max<int64_t>(1, kPiece / width);
    for (int64_t first = 0; first < rows; first += step) {
      const int64_t count = std::min(step, rows - first);
      values_.resize(static_cast<size_t>(count * width));
      int64_t column = 0;
      for (size_t p = 0; p < ours.size(); ++p) {
        const int64_t part_rows = tensor.parts[p].shape[0];
        Transpose(ours[p].get() + first, part_rows, count, rows, values_.data() + column, width);
        column += part_rows;
      }
      ZS_RETURN_IF_ERROR(Append());
    }
    return absl::OkStatus();
  }

  // to[c][r] = from[r][c] for `rows` x `cols`, by tiles that the cache holds.
  static void Transpose(const float* from, int64_t rows, int64_t cols, int64_t from_width,
                        float* to, int64_t to_width) {
    constexpr int64_t kTile = 32;
    for (int64_t r0 = 0; r0 < rows; r0 += kTile) {
      for (int64_t c0 = 0; c0 < cols; c0 += kTile) {
        for (int64_t c = c0; c < std::min(cols, c0 + kTile); ++c) {
          for (int64_t r = r0; r < std::min(rows, r0 + kTile); ++r) {
            to[c * to_width + r] = from[r * from_width + c];
          }
        }
      }
    }
  }

  absl::Status Append() {
    if (options_.stopped && options_.stopped()) {
      return absl::AbortedError(absl::StrCat("the export was stopped at ", done_, " of ", total_,
                                             " bytes; nothing was left behind"));
    }
    const auto count = static_cast<int64_t>(values_.size());
    const uint64_t bytes = values_.size() * SizeOf(options_.dtype);
    if (options_.dtype == DType::kBF16) {
      rounded_.resize(values_.size());
      RoundToBf16(values_.data(), count, rounded_.data());
      ZS_RETURN_IF_ERROR(writer_->Append(rounded_.data(), bytes));
    } else if (options_.dtype == DType::kF16) {
      rounded_.clear();
      for (const float value : values_) rounded_.push_back(HalfOf(value).bits);
      ZS_RETURN_IF_ERROR(writer_->Append(rounded_.data(), bytes));
    } else {
      ZS_RETURN_IF_ERROR(writer_->Append(values_.data(), bytes));
    }
    done_ += bytes;
    if (options_.progress) options_.progress(done_, total_);
    return absl::OkStatus();
  }

  const ParameterSource& source_;
  const HfExportOptions& options_;
  const uint64_t total_;
  uint64_t done_ = 0;
  std::unique_ptr<SafetensorsWriter> writer_;
  std::vector<float> values_;
  std::vector<uint16_t> rounded_;
};

absl::Status WriteWeights(const ModelTable& model, const ParameterSource& source,
                          const std::string& folder, const HfExportOptions& options) {
  const std::vector<HfTensor> tensors = MakeHfTensors(model);
  uint64_t total = 0;
  for (const HfTensor& tensor : tensors) total += Bytes(tensor, options.dtype);
  const auto shards = MakeShards(tensors, options.dtype, options.max_shard_bytes);
  Exporter exporter(source, options, total);
  nlohmann::ordered_json weight_map = nlohmann::ordered_json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = ShardName(i, shards.size());
    ZS_RETURN_IF_ERROR(exporter.WriteShard(absl::StrCat(folder, "/", name), shards[i]));
    for (const HfTensor* tensor : shards[i]) weight_map[tensor->name] = name;
  }
  if (shards.size() == 1) return absl::OkStatus();
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", total}}},
                                        {"weight_map", std::move(weight_map)}};
  return WriteFileAtomically(absl::StrCat(folder, "/model.safetensors.index.json"),
                             absl::StrCat(index.dump(2), "\n"));
}

// The model's own config.json, whose one change is the type of the weights beside it.
absl::StatusOr<std::string> OwnConfig(const std::string& path, const v1::ModelSpec& model,
                                      const std::string& dtype) {
  ZS_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  ZS_ASSIGN_OR_RETURN(const HfConfig config, ParseHfConfig(text, path));
  const std::vector<std::string> differences = ModelDifferences(model, config.model);
  if (!differences.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " describes another model than the one that is exported:\n",
                     absl::StrJoin(differences, "\n")));
  }
  ZS_ASSIGN_OR_RETURN(nlohmann::ordered_json json, ParseJsonObject(text, path));
  // Newer files call it dtype.
  if (json.contains("dtype")) json["dtype"] = dtype;
  if (json.contains("torch_dtype") || !json.contains("dtype")) json["torch_dtype"] = dtype;
  return absl::StrCat(json.dump(2), "\n");
}

// transformers takes from it when to stop; the rest is how a model is sampled, which nobody has
// said.
std::string GenerationConfig(int32_t end_of_text) {
  const nlohmann::ordered_json json = {{"bos_token_id", nullptr}, {"eos_token_id", end_of_text}};
  return absl::StrCat(json.dump(2), "\n");
}

absl::Status WriteAssets(const v1::ModelSpec& model, const std::string& folder,
                         const HfExportOptions& options) {
  const std::string dtype = options.dtype == DType::kF32    ? "float32"
                            : options.dtype == DType::kBF16 ? "bfloat16"
                                                            : "float16";
  std::vector<std::string> names;
  if (!options.assets.empty()) names = ListHfAssets(options.assets);
  const auto has = [&names](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  std::string config;
  if (has("config.json")) {
    ZS_ASSIGN_OR_RETURN(config,
                        OwnConfig(absl::StrCat(options.assets, "/config.json"), model, dtype));
  } else {
    ZS_ASSIGN_OR_RETURN(config, FormatHfConfig(model, dtype, options.end_of_text));
    if (options.end_of_text.has_value() && !has("generation_config.json")) {
      ZS_RETURN_IF_ERROR(WriteFileAtomically(absl::StrCat(folder, "/generation_config.json"),
                                             GenerationConfig(*options.end_of_text)));
    }
  }
  ZS_RETURN_IF_ERROR(WriteFileAtomically(absl::StrCat(folder, "/config.json"), config));
  for (const std::string& name : names) {
    if (name == "config.json") continue;
    ZS_ASSIGN_OR_RETURN(const std::string content,
                        ReadFile(absl::StrCat(options.assets, "/", name), kMaxAsset));
    ZS_RETURN_IF_ERROR(WriteFileAtomically(absl::StrCat(folder, "/", name), content));
  }
  return absl::OkStatus();
}

absl::Status CheckFree(const std::string& folder) {
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (!fs::exists(status)) return absl::OkStatus();
  if (!fs::is_directory(status)) {
    return absl::AlreadyExistsError(
        absl::StrCat(folder, " is there and is no folder; wanted a new or an empty one"));
  }
  const bool empty = fs::is_empty(folder, error);
  if (error) return ErrnoError(error.value(), "look into", folder);
  if (empty) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat(folder, " holds files; wanted a new or an empty folder"));
}

}  // namespace

std::vector<std::string> ListHfAssets(const std::string& folder) {
  std::vector<std::string> found = Present(folder, kTokenizerFiles);
  for (std::string& name : Present(folder, kModelFiles)) found.push_back(std::move(name));
  std::sort(found.begin(), found.end());
  return found;
}

bool IsTokenizerAsset(absl::string_view name) {
  return std::find(std::begin(kTokenizerFiles), std::end(kTokenizerFiles), name) !=
         std::end(kTokenizerFiles);
}

std::vector<HfAsset> TokenizerAssets(const std::string& tokenizer) {
  std::vector<HfAsset> assets;
  std::error_code error;
  const fs::file_status status = fs::status(tokenizer, error);
  const bool file = fs::is_regular_file(status);
  if (!file && !fs::is_directory(status)) return assets;
  const fs::path folder = file ? fs::path(tokenizer).parent_path() : fs::path(tokenizer);
  for (std::string& name : Present(folder.empty() ? "." : folder.string(), kTokenizerFiles)) {
    std::string source = (folder / name).string();
    if (name == kTokenizerJson && file) source = tokenizer;
    assets.push_back({std::move(source), std::move(name)});
  }
  const bool listed = std::any_of(assets.begin(), assets.end(), [](const HfAsset& asset) {
    return asset.name == kTokenizerJson;
  });
  if (file && !listed) assets.push_back({tokenizer, kTokenizerJson});
  return assets;
}

absl::Status ExportHfFolder(const v1::ModelSpec& model, const ParameterSource& source,
                            const std::string& folder, const HfExportOptions& options) {
  if (!IsFloat(options.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights are exported as bf16, fp16 or fp32, not as ", NameOf(options.dtype)));
  }
  ZS_ASSIGN_OR_RETURN(const ModelTable table, MakeModelTable(model));
  fs::path target = fs::path(folder).lexically_normal();
  if (target.filename().empty()) target = target.parent_path();  // "models/mine/"
  if (target.empty() || target.filename() == "." || target.filename() == "..") {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", folder, "\" is no name for a folder that can be made"));
  }
  ZS_RETURN_IF_ERROR(CheckFree(target.string()));
  const std::string parent = target.has_parent_path() ? target.parent_path().string() : ".";
  ZS_RETURN_IF_ERROR(MakeFolders(parent));
  const std::string temporary = absl::StrCat(target.string(), ".", getpid(), ".tmp");
  std::error_code ignored;
  fs::remove_all(temporary, ignored);
  const absl::Cleanup remove = [&temporary] {
    std::error_code error;
    fs::remove_all(temporary, error);
  };
  ZS_RETURN_IF_ERROR(MakeFolders(temporary));
  // What is quick to refuse comes first.
  ZS_RETURN_IF_ERROR(WriteAssets(model, temporary, options));
  ZS_RETURN_IF_ERROR(WriteWeights(table, source, temporary, options));
  ZS_RETURN_IF_ERROR(SyncFolder(temporary));
  // Onto an empty folder too; not onto one that has been filled meanwhile.
  if (std::rename(temporary.c_str(), target.c_str()) != 0) {
    return ErrnoError(errno, absl::StrCat("rename ", temporary, " to"), target.string());
  }
  return SyncFolder(parent);
}

}  // namespace zeroshard
