#include "tests/reference/reference.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/status_macros.h"

namespace zeroshard {

std::vector<std::string> ReferenceNames() {
  return {"gpt2",           "llama",        "llama_tied",
          "llama_biased",   "qwen2",        "llama_documents",
          "gpt2_documents", "gpt2_dropout", "llama_dropout"};
}

absl::StatusOr<Reference> Reference::Load(const std::string& name) {
  // Programs that run elsewhere bring the files along.
  const char* moved = std::getenv("ZEROSHARD_REFERENCE_DIR");
  const std::string stem =
      absl::StrCat(moved != nullptr ? moved : ZEROSHARD_REFERENCE_DIR, "/", name);
  Reference reference;
  ZS_ASSIGN_OR_RETURN(const std::string json, ReadFile(stem + ".json"));
  const auto parsed = google::protobuf::util::JsonStringToMessage(json, &reference.spec_);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(stem, ".json: ", parsed.ToString()));
  }
  ZS_ASSIGN_OR_RETURN(reference.table_, MakeModelTable(reference.spec_.model()));
  ZS_ASSIGN_OR_RETURN(reference.file_, SafetensorsFile::Open(stem + ".safetensors"));
  return reference;
}

absl::StatusOr<std::vector<float>> Reference::Tensor(const std::string& group,
                                                     const std::string& name) const {
  const std::string key = absl::StrCat(group, "/", name);
  ZS_ASSIGN_OR_RETURN(const SafetensorsEntry* entry, file_->Find(key));
  for (const UnitTable& unit : table_.units) {
    for (const ParameterInfo& p : unit.parameters) {
      if (p.name == name && p.shape == entry->shape) return file_->ReadFloats(key);
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(key, " is no tensor of this model and shape"));
}

absl::StatusOr<std::vector<float>> Reference::FlatUnit(const std::string& group,
                                                       const UnitTable& unit) const {
  std::vector<float> flat(static_cast<size_t>(unit.length));
  for (const ParameterInfo& p : unit.parameters) {
    ZS_ASSIGN_OR_RETURN(const std::vector<float> values, Tensor(group, p.name));
    std::copy(values.begin(), values.end(), flat.begin() + p.offset);
  }
  return flat;
}

absl::StatusOr<std::vector<float>> Reference::Floats(const std::string& name) const {
  return file_->ReadFloats(name);
}

absl::StatusOr<std::vector<int32_t>> Reference::Ints(const std::string& name) const {
  return file_->ReadInts(name);
}

}  // namespace zeroshard
