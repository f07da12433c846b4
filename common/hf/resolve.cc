// A specification that starts from a Hugging Face folder.
#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/hf/config.h"
#include "common/spec/scalar.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

using google::protobuf::FieldDescriptor;

constexpr uint32_t kLongestByDefault = 4096;  // tokens

bool MayDiffer(const std::string& key) {
  static const auto* const keys = new std::set<std::string>{
      "init_from", "sequence_length", "trainable", "embd_pdrop", "attn_pdrop", "resid_pdrop"};
  return keys->count(key) > 0;
}

// A scaling of the kind "default" is none.
v1::ModelSpec WithoutPlainRope(v1::ModelSpec model) {
  if (model.has_rope_scaling() && model.rope_scaling().rope_type() == "default") {
    model.clear_rope_scaling();
  }
  return model;
}

std::string Shown(const v1::ModelSpec& model, const FieldDescriptor* field) {
  const auto* reflection = model.GetReflection();
  if (field->has_presence() && !reflection->HasField(model, field)) return "absent";
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32: {
      const uint32_t value = reflection->GetUInt32(model, field);
      return value == 0 ? "absent" : absl::StrCat(value);
    }
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return DoubleToText(reflection->GetDouble(model, field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection->GetBool(model, field) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_STRING:
      return absl::StrCat("\"", reflection->GetString(model, field), "\"");
    default: {
      std::string text = reflection->GetMessage(model, field).ShortDebugString();
      absl::StripAsciiWhitespace(&text);
      return absl::StrCat("{", text, "}");
    }
  }
}

bool IsSet(const v1::ModelSpec& model, const FieldDescriptor* field) {
  return model.GetReflection()->HasField(model, field);
}

// What is written in the specification and differs.
std::vector<std::string> Conflicts(const v1::ModelSpec& seen, const v1::ModelSpec& wanted,
                                   bool written_only) {
  const v1::ModelSpec a = WithoutPlainRope(seen);
  const v1::ModelSpec b = WithoutPlainRope(wanted);
  std::vector<std::string> lines;
  const auto* descriptor = v1::ModelSpec::descriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* field = descriptor->field(i);
    if (MayDiffer(field->name())) continue;
    if (!IsSet(a, field) && (written_only || !IsSet(b, field))) continue;
    const std::string left = Shown(a, field);
    const std::string right = Shown(b, field);
    if (left != right) {
      lines.push_back(absl::StrCat("model.", field->name(), ": seen ", left, ", wanted ", right));
    }
  }
  return lines;
}

absl::Status SetSequence(const HfConfig& config, const std::string& where, v1::ModelSpec* model) {
  const uint32_t longest = config.model.max_position_embeddings();
  if (model->sequence_length() == 0) {
    model->set_sequence_length(std::min(longest, kLongestByDefault));
  }
  if (model->sequence_length() <= longest) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("model.sequence_length: seen ", model->sequence_length(), ", wanted at most ",
                   longest, ", which is ", config.longest_field, " in ", where));
}

std::vector<std::string> DropoutWarnings(const HfConfig& config, const std::string& where,
                                         const v1::ModelSpec& model) {
  const auto asked = [&model](const std::string& key) {
    return key == "embd_pdrop"   ? model.embd_pdrop() > 0
           : key == "attn_pdrop" ? model.attn_pdrop() > 0
                                 : model.resid_pdrop() > 0;
  };
  std::vector<std::string> warnings;
  for (const HfConfig::Dropout& rate : config.dropout) {
    if (asked(rate.key)) continue;
    warnings.push_back(absl::StrCat(where, ": ", rate.field, " is ", DoubleToText(rate.rate),
                                    ", but training is without dropout unless the specification "
                                    "asks for it; write model.",
                                    rate.key, ": ", DoubleToText(rate.rate), " to have it"));
  }
  return warnings;
}

}  // namespace

std::vector<std::string> ModelDifferences(const v1::ModelSpec& seen, const v1::ModelSpec& wanted) {
  return Conflicts(seen, wanted, /*written_only=*/false);
}

absl::StatusOr<std::vector<std::string>> ResolveInitFrom(v1::JobSpec* spec) {
  if (spec->model().init_from().empty()) return std::vector<std::string>();
  v1::ModelSpec* model = spec->mutable_model();
  absl::StatusOr<HfConfig> config = ReadHfConfig(model->init_from());
  if (!config.ok()) {
    return absl::Status(config.status().code(),
                        absl::StrCat("model.init_from: ", config.status().message()));
  }
  const std::string where = absl::StrCat(model->init_from(), "/config.json");
  const std::vector<std::string> conflicts =
      Conflicts(*model, config->model, /*written_only=*/true);
  if (!conflicts.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(absl::StrJoin(conflicts, "\n"), "\n", where,
                     " (model.init_from) says otherwise; leave out the keys that it fills in"));
  }
  ZS_RETURN_IF_ERROR(SetSequence(*config, where, model));
  // Everything of the config, and what the specification alone decides.
  v1::ModelSpec merged = config->model;
  merged.set_init_from(model->init_from());
  merged.set_sequence_length(model->sequence_length());
  *merged.mutable_trainable() = model->trainable();
  merged.set_embd_pdrop(model->embd_pdrop());
  merged.set_attn_pdrop(model->attn_pdrop());
  merged.set_resid_pdrop(model->resid_pdrop());
  if (model->has_initializer_range()) merged.set_initializer_range(model->initializer_range());
  std::vector<std::string> warnings = std::move(config->warnings);
  for (std::string& line : DropoutWarnings(*config, where, merged)) {
    warnings.push_back(std::move(line));
  }
  *model = std::move(merged);
  return warnings;
}

}  // namespace zeroshard
