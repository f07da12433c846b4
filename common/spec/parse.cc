#include <yaml-cpp/yaml.h>

#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/spec/deepspeed_keys.h"
#include "common/spec/job_spec.h"
#include "common/spec/nearest_key.h"
#include "common/spec/scalar.h"
#include "common/spec/yaml_documents.h"

namespace zeroshard {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr size_t kMaxText = 1 << 20;
constexpr size_t kMaxValues = 100'000;
constexpr size_t kMaxExpandedBytes = 4 << 20;
constexpr size_t kMaxString = 4096;
constexpr size_t kMaxProblems = 10;

std::string Quoted(absl::string_view text) {
  constexpr size_t kShown = 60;
  if (text.size() > kShown)
    return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kShown)), "…\"");
  return absl::StrCat("\"", absl::CHexEscape(text), "\"");
}

// A scalar without quotes, whose text decides what it is.
bool IsPlain(const YAML::Node& node) { return node.IsScalar() && node.Tag() != "!"; }

std::string Describe(const YAML::Node& node) {
  if (node.IsMap()) return "a mapping";
  if (node.IsSequence()) return "a list";
  if (node.IsNull() || !node.IsScalar()) return "nothing";
  if (IsPlain(node)) {
    if (IsNumberText(node.Scalar())) return absl::StrCat("the number ", node.Scalar());
    if (BoolFromText(node.Scalar())) return node.Scalar();
  }
  return absl::StrCat("the text ", Quoted(node.Scalar()));
}

std::vector<std::string> KeysOf(const Descriptor* type) {
  std::vector<std::string> names;
  for (int i = 0; i < type->field_count(); ++i) names.push_back(type->field(i)->name());
  return names;
}

// Paths of every key of that name anywhere below `type`.
void FindElsewhere(const Descriptor* type, absl::string_view name, const std::string& prefix,
                   std::vector<std::string>* found) {
  for (int i = 0; i < type->field_count(); ++i) {
    const FieldDescriptor* field = type->field(i);
    const std::string path = absl::StrCat(prefix, field->name());
    if (field->name() == name) found->push_back(path);
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      FindElsewhere(field->message_type(), name, absl::StrCat(path, "."), found);
    }
  }
}

std::string Join(absl::string_view path, absl::string_view key) {
  return path.empty() ? std::string(key) : absl::StrCat(path, ".", key);
}

// One element to fill: a singular field, or an element of a list (index -1 appends).
struct Slot {
  Message* message;
  const FieldDescriptor* field;
  int index = -1;
};

void Store(const Slot& slot, bool value) {
  const auto* reflection = slot.message->GetReflection();
  if (!slot.field->is_repeated()) return reflection->SetBool(slot.message, slot.field, value);
  if (slot.index < 0) return reflection->AddBool(slot.message, slot.field, value);
  reflection->SetRepeatedBool(slot.message, slot.field, slot.index, value);
}

void Store(const Slot& slot, double value) {
  const auto* reflection = slot.message->GetReflection();
  if (!slot.field->is_repeated()) return reflection->SetDouble(slot.message, slot.field, value);
  if (slot.index < 0) return reflection->AddDouble(slot.message, slot.field, value);
  reflection->SetRepeatedDouble(slot.message, slot.field, slot.index, value);
}

void Store(const Slot& slot, const std::string& value) {
  const auto* reflection = slot.message->GetReflection();
  if (!slot.field->is_repeated()) return reflection->SetString(slot.message, slot.field, value);
  if (slot.index < 0) return reflection->AddString(slot.message, slot.field, value);
  reflection->SetRepeatedString(slot.message, slot.field, slot.index, value);
}

void Store(const Slot& slot, uint64_t value) {
  const auto* reflection = slot.message->GetReflection();
  const bool wide = slot.field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64;
  const uint32_t narrow = static_cast<uint32_t>(value);
  if (!slot.field->is_repeated()) {
    if (wide) return reflection->SetUInt64(slot.message, slot.field, value);
    return reflection->SetUInt32(slot.message, slot.field, narrow);
  }
  if (slot.index < 0) {
    if (wide) return reflection->AddUInt64(slot.message, slot.field, value);
    return reflection->AddUInt32(slot.message, slot.field, narrow);
  }
  if (wide) return reflection->SetRepeatedUInt64(slot.message, slot.field, slot.index, value);
  reflection->SetRepeatedUInt32(slot.message, slot.field, slot.index, narrow);
}

// Walks YAML nodes against a message's descriptor. Collects problems instead of stopping at the
// first, so that a pasted ds_config.json is corrected in one go.
class Reader {
 public:
  explicit Reader(v1::JobSpec* spec) : spec_(spec) {}

  absl::Status status() const {
    if (!exhausted_.ok()) return exhausted_;
    if (problems_.empty()) return absl::OkStatus();
    std::vector<std::string> shown(problems_.begin(),
                                   problems_.begin() + std::min(problems_.size(), kMaxProblems));
    if (problems_.size() > kMaxProblems) {
      shown.push_back(absl::StrCat("and ", problems_.size() - kMaxProblems, " more"));
    }
    return absl::InvalidArgumentError(absl::StrJoin(shown, "\n"));
  }

  void ReadFile(absl::string_view text, absl::string_view source) {
    source_ = std::string(source);
    show_position_ = true;
    YamlDocuments documents;
    if (!Load(text, &documents)) return;
    if (documents.second.has_value()) {
      return Problem(
          *documents.second, "",
          "a second document, or what is left after a bracket too many; a job is one document");
    }
    if (!documents.first.has_value() || !documents.first->IsMap()) {
      return Problem(
          YAML::Mark::null_mark(), "",
          absl::StrCat("seen ",
                       documents.first.has_value() ? Describe(*documents.first) : "nothing",
                       ", wanted a mapping with the keys of a job (name, model, data, "
                       "steps, ...)"));
    }
    ReadMessage(*documents.first, spec_, "");
  }

  void ReadOverride(const std::string& text) {
    source_ = absl::StrCat("--set ", text.substr(0, 200));
    show_position_ = false;
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0) {
      return Problem(YAML::Mark::null_mark(), "", "wanted key.path=value, for example steps=20");
    }
    YamlDocuments documents;
    if (!Load(text.substr(equals + 1), &documents)) return;
    if (!documents.first.has_value() || documents.second.has_value()) {
      return Problem(YAML::Mark::null_mark(), text.substr(0, equals), "wanted one value after '='");
    }
    Override(absl::StrSplit(text.substr(0, equals), '.'), *documents.first);
  }

 private:
  bool Load(absl::string_view text, YamlDocuments* documents) {
    if (text.size() > kMaxText) {
      exhausted_ = absl::ResourceExhaustedError(
          absl::StrCat(source_, ": ", text.size(), " bytes, at most ", kMaxText, " are read"));
      return false;
    }
    try {
      *documents = LoadYaml(std::string(text));
      return true;
    } catch (const YAML::Exception& error) {
      Problem(error.mark, "", absl::StrCat("not YAML or JSON: ", error.msg));
    }
    return false;
  }

  void Problem(const YAML::Mark& mark, absl::string_view path, absl::string_view what) {
    std::string where = source_;
    if (show_position_ && !mark.is_null()) {
      absl::StrAppend(&where, ":", mark.line + 1, ":", mark.column + 1);
    }
    problems_.push_back(path.empty() ? absl::StrCat(where, ": ", what)
                                     : absl::StrCat(where, ": ", path, ": ", what));
  }

  // False once aliases have expanded to more than a specification can need.
  bool Spend(const YAML::Node& node) {
    ++values_;
    if (node.IsScalar()) bytes_ += node.Scalar().size();
    if (exhausted_.ok() && (values_ > kMaxValues || bytes_ > kMaxExpandedBytes)) {
      exhausted_ = absl::ResourceExhaustedError(absl::StrCat(
          source_, ": expands to more than ", kMaxValues, " values or ", kMaxExpandedBytes,
          " bytes of text; a job needs far less: look for aliases (*name) that repeat"));
    }
    return exhausted_.ok();
  }

  void UnknownKey(const YAML::Mark& mark, const Descriptor* type, absl::string_view parent,
                  const std::string& key) {
    const std::string path = Join(parent, key);
    if (key == "<<") {
      return Problem(mark, path, "merge keys are not read; alias whole values with *name instead");
    }
    const absl::string_view advice = DeepSpeedKeyAdvice(path);
    if (!advice.empty()) {
      return Problem(mark, path,
                     absl::StrCat("is a DeepSpeed key that ZeroShard does not support: ", advice));
    }
    const std::string shown = Join(parent, Shorten(key));
    std::vector<std::string> elsewhere;
    FindElsewhere(spec_->GetDescriptor(), key, "", &elsewhere);
    if (!elsewhere.empty()) {
      return Problem(
          mark, shown,
          absl::StrCat("no such key here; did you mean ", absl::StrJoin(elsewhere, " or "), "?"));
    }
    const std::string nearest = NearestKey(key, KeysOf(type));
    if (!nearest.empty()) {
      return Problem(mark, shown, absl::StrCat("unknown key; did you mean ", nearest, "?"));
    }
    Problem(mark, shown,
            absl::StrCat("unknown key; known here are ", absl::StrJoin(KeysOf(type), ", ")));
  }

  static std::string Shorten(const std::string& key) {
    constexpr size_t kShown = 80;
    const std::string text = absl::CHexEscape(key);
    return text.size() > kShown ? absl::StrCat(text.substr(0, kShown), "...") : text;
  }

  void ReadMessage(const YAML::Node& node, Message* message, const std::string& path) {
    const Descriptor* type = message->GetDescriptor();
    std::set<std::string> seen;
    for (const auto& entry : node) {
      if (!Spend(entry.second)) return;
      if (!entry.first.IsScalar()) {
        Problem(entry.first.Mark(), path,
                absl::StrCat("a key is ", Describe(entry.first), ", wanted a word"));
        continue;
      }
      const std::string& key = entry.first.Scalar();
      const FieldDescriptor* field = type->FindFieldByName(key);
      if (field == nullptr) {
        UnknownKey(entry.first.Mark(), type, path, key);
      } else if (!seen.insert(key).second) {
        Problem(entry.first.Mark(), Join(path, key), "given twice; remove one");
      } else {
        ReadField(entry.second, message, field, Join(path, key));
      }
    }
  }

  void ReadField(const YAML::Node& node, Message* message, const FieldDescriptor* field,
                 const std::string& path) {
    if (field->is_repeated()) {
      if (!node.IsSequence()) {
        if (IsAuto(node, field)) return Auto(node.Mark(), path);
        return WrongType(node, path,
                         absl::StrCat("a list of ", WantedElement(field), "s, in brackets: [ ]"));
      }
      int index = 0;
      for (const YAML::Node& element : node) {
        if (!Spend(element)) return;
        ReadScalar(element, {message, field}, Join(path, absl::StrCat(index++)));
      }
      return;
    }
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      if (!node.IsMap()) {
        if (IsAuto(node, field)) return Auto(node.Mark(), path);
        return WrongType(node, path,
                         absl::StrCat("a mapping with the keys ",
                                      absl::StrJoin(KeysOf(field->message_type()), ", ")));
      }
      return ReadMessage(node, message->GetReflection()->MutableMessage(message, field), path);
    }
    ReadScalar(node, {message, field}, path);
  }

  static absl::string_view WantedElement(const FieldDescriptor* field) {
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        return "text";
      case FieldDescriptor::CPPTYPE_BOOL:
        return "truth value";
      default:
        return "number";
    }
  }

  // `auto` leaves a value to a Python trainer. Names, paths and patterns may be called so.
  static bool IsAuto(const YAML::Node& node, const FieldDescriptor* field) {
    if (!node.IsScalar() || node.Scalar() != "auto") return false;
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_STRING) return true;
    return field->name() == "type" || field->name() == "device" || field->name() == "warmup_type" ||
           field->name() == "tokenizer" || field->name() == "architecture";
  }

  void Auto(const YAML::Mark& mark, const std::string& path) {
    Problem(mark, path,
            "the value auto, which leaves the choice to a training script, is not supported: there "
            "is none here; write the value, or remove the key for the default");
  }

  void WrongType(const YAML::Node& node, const std::string& path, absl::string_view wanted) {
    Problem(node.Mark(), path, absl::StrCat("seen ", Describe(node), ", wanted ", wanted));
  }

  void ReadScalar(const YAML::Node& node, const Slot& slot, const std::string& path) {
    if (IsAuto(node, slot.field)) return Auto(node.Mark(), path);
    if (node.IsMap() && node.size() > 0 && node.begin()->first.IsScalar()) {
      const absl::string_view advice = DeepSpeedKeyAdvice(Join(path, node.begin()->first.Scalar()));
      if (!advice.empty()) {
        return Problem(node.Mark(), path,
                       absl::StrCat("a mapping here is a DeepSpeed key that ZeroShard does not "
                                    "support: ",
                                    advice));
      }
    }
    const bool plain = IsPlain(node);
    switch (slot.field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_BOOL: {
        const auto value = plain ? BoolFromText(node.Scalar()) : std::nullopt;
        if (!value) return WrongType(node, path, "true or false");
        return Store(slot, *value);
      }
      case FieldDescriptor::CPPTYPE_DOUBLE: {
        const auto value = plain ? DoubleFromText(node.Scalar()) : std::nullopt;
        if (!value) return WrongType(node, path, "a finite number");
        return Store(slot, *value);
      }
      case FieldDescriptor::CPPTYPE_UINT32:
      case FieldDescriptor::CPPTYPE_UINT64: {
        const uint64_t limit = slot.field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32
                                   ? std::numeric_limits<uint32_t>::max()
                                   : std::numeric_limits<uint64_t>::max();
        const auto value = plain ? UnsignedFromText(node.Scalar(), limit) : std::nullopt;
        if (!value) return WrongType(node, path, absl::StrCat("a whole number from 0 to ", limit));
        return Store(slot, *value);
      }
      case FieldDescriptor::CPPTYPE_STRING:
        return ReadString(node, slot, path);
      default:
        return WrongType(node, path, "a type that specifications have");
    }
  }

  void ReadString(const YAML::Node& node, const Slot& slot, const std::string& path) {
    if (!node.IsScalar()) return WrongType(node, path, "text");
    const std::string& text = node.Scalar();
    if (IsPlain(node) && (IsNumberText(text) || BoolFromText(text) || IsNullText(text))) {
      return WrongType(node, path, "text; put it in quotes");
    }
    if (text.size() > kMaxString) {
      return Problem(node.Mark(), path,
                     absl::StrCat("text of ", text.size(), " bytes, wanted at most ", kMaxString));
    }
    for (const char c : text) {
      if (absl::ascii_iscntrl(c)) {
        return WrongType(node, path, "text of one line without control characters");
      }
    }
    Store(slot, text);
  }

  void Override(const std::vector<std::string>& keys, const YAML::Node& value) {
    Message* message = spec_;
    std::string path;
    for (size_t i = 0; i < keys.size(); ++i) {
      const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(keys[i]);
      if (field == nullptr) {
        return UnknownKey(YAML::Mark::null_mark(), message->GetDescriptor(), path, keys[i]);
      }
      path = Join(path, keys[i]);
      const bool last = i + 1 == keys.size();
      const auto* reflection = message->GetReflection();
      if (last) {
        // Read into a fresh message, so that a list or a section is replaced and not added to.
        reflection->ClearField(message, field);
        return ReadField(value, message, field, path);
      }
      if (field->is_repeated()) {
        if (i + 2 != keys.size()) {
          return Problem(YAML::Mark::null_mark(), path, "elements of this list have no keys");
        }
        return OverrideElement(message, field, path, keys[i + 1], value);
      }
      if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
        const absl::string_view advice = DeepSpeedKeyAdvice(Join(path, keys[i + 1]));
        return Problem(YAML::Mark::null_mark(), path,
                       advice.empty() ? "has a value, not keys of its own"
                                      : absl::StrCat("a mapping here is a DeepSpeed key that "
                                                     "ZeroShard does not support: ",
                                                     advice));
      }
      message = reflection->MutableMessage(message, field);
    }
  }

  void OverrideElement(Message* message, const FieldDescriptor* field, const std::string& path,
                       const std::string& index_text, const YAML::Node& value) {
    const int size = message->GetReflection()->FieldSize(*message, field);
    const auto index = UnsignedFromText(index_text, std::numeric_limits<int>::max());
    if (!index || *index > static_cast<uint64_t>(size)) {
      return Problem(YAML::Mark::null_mark(), path,
                     absl::StrCat("seen the element ", Quoted(index_text), ", wanted 0 to ", size,
                                  " (the list has ", size, ", the last of these appends)"));
    }
    const bool append = *index == static_cast<uint64_t>(size);
    ReadScalar(value, {message, field, append ? -1 : static_cast<int>(*index)},
               Join(path, index_text));
  }

  v1::JobSpec* const spec_;
  std::string source_;
  bool show_position_ = true;
  std::vector<std::string> problems_;
  absl::Status exhausted_;
  size_t values_ = 0;
  size_t bytes_ = 0;
};

}  // namespace

absl::StatusOr<v1::JobSpec> ParseJobSpec(absl::string_view text, absl::string_view source_name,
                                         absl::Span<const std::string> overrides) {
  v1::JobSpec spec;
  Reader reader(&spec);
  try {
    reader.ReadFile(text, source_name);
    for (const std::string& override_text : overrides) reader.ReadOverride(override_text);
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(source_name, ": ", error.what()));
  }
  if (absl::Status status = reader.status(); !status.ok()) return status;
  return spec;
}

}  // namespace zeroshard
