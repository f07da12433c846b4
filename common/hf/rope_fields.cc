#include "common/hf/rope_fields.h"

#include <google/protobuf/util/message_differencer.h>

#include <optional>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr double kDefaultTheta = 10000.0;
constexpr int64_t kMaxPositions = (int64_t{1} << 31) - 1;

// One object, rope_scaling or rope_parameters.
struct Rope {
  v1::RopeScaling scaling;
  std::optional<double> theta;
};

std::string ReadKind(const std::string& name, JsonFields* fields) {
  if (!fields->Has("type")) return fields->Text("rope_type", "default");
  const std::string kind = fields->Text("type");
  if (fields->Has("rope_type") && fields->Text("rope_type") != kind) {
    fields->Refuse("rope_type",
                   absl::StrCat("the same as ", name, ".type, which is \"", kind, "\""));
  }
  return kind;
}

void ReadLlama3(JsonFields* fields, v1::RopeScaling* scaling) {
  scaling->set_low_freq_factor(fields->Real("low_freq_factor", 0.0, false));
  scaling->set_high_freq_factor(fields->Real("high_freq_factor", 0.0, false));
  scaling->set_original_max_position_embeddings(
      static_cast<uint32_t>(fields->Count("original_max_position_embeddings", 1, kMaxPositions)));
}

Rope ReadObject(const nlohmann::ordered_json& object, const std::string& name, JsonFields* outer,
                std::vector<std::string>* warnings) {
  JsonFields fields(object, outer->where(), name + ".");
  Rope rope;
  const std::string kind = ReadKind(name, &fields);
  if (fields.Has("rope_theta")) rope.theta = fields.Real("rope_theta", 0.0, false);
  rope.scaling.set_rope_type(kind);
  if (kind == "linear" || kind == "llama3") {
    rope.scaling.set_factor(fields.Real("factor", 0.0, false));
    if (kind == "llama3") ReadLlama3(&fields, &rope.scaling);
  } else if (kind != "default") {
    fields.Refuse(fields.Has("type") ? "type" : "rope_type",
                  "default, linear or llama3; other ways to stretch rotary positions are not "
                  "supported");
  }
  if (fields.Real("partial_rotary_factor", 0.0, false, 1.0) != 1.0) {
    fields.Refuse("partial_rotary_factor", "1: the whole head is turned");
  }
  for (const std::string& other : fields.Others({})) {
    // A table for each kind of layer, as models with several kinds have it.
    const auto found = object.find(other);
    if (found != object.end() && found->is_object()) {
      fields.Refuse(other, "no object: every layer has the same rotary positions");
      break;
    }
    warnings->push_back(absl::StrCat(outer->where(), ": the field ", name, ".", other,
                                     " has no effect with the kind ", kind));
  }
  outer->Refuse(fields.status());
  return rope;
}

}  // namespace

void ReadRope(JsonFields* fields, std::vector<std::string>* warnings, v1::ModelSpec* model) {
  if (fields->Real("partial_rotary_factor", 0.0, false, 1.0) != 1.0) {
    fields->Refuse("partial_rotary_factor", "1: the whole head is turned");
  }
  std::optional<Rope> older, newer;
  if (const auto* object = fields->Object("rope_scaling")) {
    older = ReadObject(*object, "rope_scaling", fields, warnings);
  }
  if (const auto* object = fields->Object("rope_parameters")) {
    newer = ReadObject(*object, "rope_parameters", fields, warnings);
  }
  std::optional<double> theta;
  if (fields->Has("rope_theta")) theta = fields->Real("rope_theta", 0.0, false);
  for (const auto& [rope, name] : {std::make_pair(&older, "rope_scaling.rope_theta"),
                                   std::make_pair(&newer, "rope_parameters.rope_theta")}) {
    if (!*rope || !(*rope)->theta) continue;
    if (theta && *theta != *(*rope)->theta) {
      fields->Refuse("rope_theta",
                     absl::StrCat("the same as ", name, ", which is ", *(*rope)->theta));
    }
    theta = (*rope)->theta;
  }
  if (older && newer &&
      !google::protobuf::util::MessageDifferencer::Equals(older->scaling, newer->scaling)) {
    fields->Refuse("rope_scaling",
                   "the same as rope_parameters beside it, or one of the two alone");
  }
  model->set_rope_theta(theta.value_or(kDefaultTheta));
  const std::optional<Rope>& rope = newer ? newer : older;
  if (rope && rope->scaling.rope_type() != "default") {
    *model->mutable_rope_scaling() = rope->scaling;
  }
}

}  // namespace zeroshard
