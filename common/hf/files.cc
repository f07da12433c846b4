#include "common/hf/files.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/files.h"
#include "common/hf/json.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

constexpr char kSingle[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr size_t kMaxIndex = 16 << 20;  // bytes

bool Exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

absl::Status NoWeights(const std::string& folder) {
  std::string others;
  std::error_code error;
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5",
                           "consolidated.safetensors", "adapter_model.safetensors"}) {
    if (fs::exists(folder + "/" + name, error)) others = name;
  }
  return absl::NotFoundError(absl::StrCat(
      folder, " has neither ", kSingle, " nor ", kIndex,
      others.empty() ? ""
                     : absl::StrCat("; it has ", others,
                                    ", which is not read: save the model with transformers' "
                                    "save_pretrained first")));
}

absl::StatusOr<HfFiles> OpenSingle(const std::string& folder) {
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file,
                      SafetensorsFile::Open(absl::StrCat(folder, "/", kSingle)));
  HfFiles result;
  for (const auto& [name, entry] : file->tensors()) result.tensors[name] = {file.get(), &entry};
  result.files.push_back(std::move(file));
  return result;
}

using FileMap = std::map<std::string, const SafetensorsFile*>;  // by name in the folder

absl::Status OpenShards(const std::string& folder, const std::string& index,
                        const std::map<std::string, std::string>& shard_of, HfFiles* result,
                        FileMap* opened) {
  for (const auto& [tensor, shard] : shard_of) {
    if (opened->count(shard) > 0) continue;
    if (shard.empty() || absl::StrContains(shard, '/') || absl::StrContains(shard, '\0') ||
        shard == "." || shard == "..") {
      return absl::InvalidArgumentError(
          absl::StrCat(index, ": weight_map says that \"", tensor, "\" is in \"", shard,
                       "\"; wanted the name of a file in the same folder, without any path"));
    }
    absl::StatusOr<std::unique_ptr<SafetensorsFile>> file =
        SafetensorsFile::Open(absl::StrCat(folder, "/", shard));
    if (absl::IsNotFound(file.status())) {
      return absl::NotFoundError(
          absl::StrCat(file.status().message(), "; ", index, " says that it holds \"", tensor, "\"",
                       Exists(absl::StrCat(folder, "/", kSingle))
                           ? absl::StrCat(" (to load ", kSingle, " instead, remove the index)")
                           : "; is the download complete?"));
    }
    ZS_RETURN_IF_ERROR(file.status());
    (*opened)[shard] = file->get();
    result->files.push_back(*std::move(file));
  }
  return absl::OkStatus();
}

absl::Status PlaceTensors(const std::string& index,
                          const std::map<std::string, std::string>& shard_of, const FileMap& opened,
                          HfFiles* result) {
  for (const auto& [tensor, shard] : shard_of) {
    const SafetensorsFile* file = opened.at(shard);
    const auto found = file->tensors().find(tensor);
    if (found != file->tensors().end()) {
      result->tensors[tensor] = {file, &found->second};
      continue;
    }
    std::string elsewhere = "no other file has it";
    for (const auto& [name, other] : opened) {
      if (other->tensors().count(tensor) > 0) elsewhere = absl::StrCat(name, " has it");
    }
    return absl::InvalidArgumentError(absl::StrCat(index, ": weight_map says that \"", tensor,
                                                   "\" is in ", shard, ", but it is not; ",
                                                   elsewhere));
  }
  return absl::OkStatus();
}

void WarnOfTheRest(const std::string& index, const std::map<std::string, std::string>& shard_of,
                   const FileMap& opened, std::vector<std::string>* warnings) {
  std::vector<std::string> unlisted;
  for (const auto& [shard, file] : opened) {
    for (const auto& [tensor, entry] : file->tensors()) {
      const auto found = shard_of.find(tensor);
      if (found == shard_of.end()) {
        unlisted.push_back(absl::StrCat(tensor, " (in ", shard, ")"));
      } else if (found->second != shard) {
        warnings->push_back(absl::StrCat(index, ": \"", tensor, "\" is in ", shard, " and in ",
                                         found->second, "; the latter counts, as weight_map says"));
      }
    }
  }
  if (unlisted.empty()) return;
  warnings->push_back(absl::StrCat(
      index, ": the files hold tensors that weight_map does not list and that are not used: ",
      ListNames(unlisted)));
}

void CheckTotalSize(const nlohmann::ordered_json& json, const std::string& index,
                    const HfFiles& files, std::vector<std::string>* warnings) {
  const auto metadata = json.find("metadata");
  if (metadata == json.end() || !metadata->is_object()) return;
  const auto total = metadata->find("total_size");
  if (total == metadata->end()) return;
  uint64_t bytes = 0;
  for (const auto& [name, place] : files.tensors) bytes += place.entry->end - place.entry->begin;
  if (total->is_number() && total->get<double>() == static_cast<double>(bytes)) return;
  warnings->push_back(absl::StrCat(index, ": metadata.total_size is ", total->dump().substr(0, 40),
                                   ", but the tensors have ", bytes, " bytes"));
}

absl::StatusOr<HfFiles> OpenIndexed(const std::string& folder, std::vector<std::string>* warnings) {
  const std::string index = absl::StrCat(folder, "/", kIndex);
  ZS_ASSIGN_OR_RETURN(const std::string text, ReadFile(index, kMaxIndex));
  ZS_ASSIGN_OR_RETURN(const nlohmann::ordered_json json, ParseJsonObject(text, index));
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object() || map->empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(index, ": wanted a weight_map, an object of tensor and file names"));
  }
  std::map<std::string, std::string> shard_of;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string()) {
      return absl::InvalidArgumentError(absl::StrCat(index, ": weight_map has a ",
                                                     shard.type_name(), " for \"", tensor,
                                                     "\"; wanted the name of a file"));
    }
    shard_of[tensor] = shard.get<std::string>();
  }
  HfFiles result;
  FileMap opened;
  ZS_RETURN_IF_ERROR(OpenShards(folder, index, shard_of, &result, &opened));
  ZS_RETURN_IF_ERROR(PlaceTensors(index, shard_of, opened, &result));
  if (opened.count(kSingle) == 0 && Exists(absl::StrCat(folder, "/", kSingle))) {
    warnings->push_back(absl::StrCat(folder, "/", kSingle, " is beside ", kIndex,
                                     ", which does not name it: it is not read"));
  }
  WarnOfTheRest(index, shard_of, opened, warnings);
  CheckTotalSize(json, index, result, warnings);
  return result;
}

}  // namespace

std::string ListNames(const std::vector<std::string>& names) {
  constexpr size_t kMost = 10;
  const size_t shown = std::min(names.size(), kMost);
  const std::string text =
      absl::StrJoin(names.begin(), names.begin() + static_cast<int64_t>(shown), ", ");
  return names.size() > kMost ? absl::StrCat(text, " and ", names.size() - kMost, " more") : text;
}

absl::StatusOr<HfFiles> OpenHfFiles(const std::string& folder, std::vector<std::string>* warnings) {
  if (Exists(absl::StrCat(folder, "/", kIndex))) return OpenIndexed(folder, warnings);
  if (Exists(absl::StrCat(folder, "/", kSingle))) return OpenSingle(folder);
  return NoWeights(folder);
}

}  // namespace zeroshard
