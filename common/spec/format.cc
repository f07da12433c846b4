#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/spec/job_spec.h"
#include "common/spec/scalar.h"

namespace zeroshard {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

std::string StringText(const std::string& text) {
  bool plain = !text.empty() && !IsNumberText(text) && !BoolFromText(text) && !IsNullText(text) &&
               (absl::ascii_isalnum(text[0]) || text[0] == '/');
  for (const char c : text) {
    plain = plain && (absl::ascii_isalnum(c) || c == '_' || c == '-' || c == '.' || c == '/');
  }
  if (plain) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (absl::ascii_iscntrl(c)) {
      absl::StrAppendFormat(&quoted, "\\x%02x", static_cast<unsigned char>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

// `index` is -1 for a singular field.
std::string ScalarText(const Message& message, const FieldDescriptor* field, int index) {
  const auto* reflection = message.GetReflection();
  const bool one = index < 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return (one ? reflection->GetBool(message, field)
                  : reflection->GetRepeatedBool(message, field, index))
                 ? "true"
                 : "false";
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return DoubleToText(one ? reflection->GetDouble(message, field)
                              : reflection->GetRepeatedDouble(message, field, index));
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(one ? reflection->GetUInt32(message, field)
                              : reflection->GetRepeatedUInt32(message, field, index));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(one ? reflection->GetUInt64(message, field)
                              : reflection->GetRepeatedUInt64(message, field, index));
    default:
      return StringText(one ? reflection->GetString(message, field)
                            : reflection->GetRepeatedString(message, field, index));
  }
}

void Append(const Message& message, const std::string& indent, std::string* out) {
  const auto* reflection = message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    absl::StrAppend(out, indent, field->name(), ":");
    if (field->is_repeated()) {
      absl::StrAppend(out, " [");
      for (int i = 0; i < reflection->FieldSize(message, field); ++i) {
        absl::StrAppend(out, i == 0 ? "" : ", ", ScalarText(message, field, i));
      }
      absl::StrAppend(out, "]\n");
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      std::string inner;
      Append(reflection->GetMessage(message, field), indent + "  ", &inner);
      absl::StrAppend(out, inner.empty() ? " {}\n" : "\n", inner);
    } else {
      absl::StrAppend(out, " ", ScalarText(message, field, -1), "\n");
    }
  }
}

}  // namespace

std::string FormatJobSpec(const v1::JobSpec& spec) {
  std::string text;
  Append(spec, "", &text);
  return text;
}

}  // namespace zeroshard
