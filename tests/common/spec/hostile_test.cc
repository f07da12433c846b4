// Texts that somebody wrote to do harm: every text of a specification is refused before it is
// used, with a message that is short and can be printed.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/spec/job_spec.h"
#include "gtest/gtest.h"
#include "tests/common/spec/test_spec.h"

namespace zeroshard {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Calls `visit` for every text that there is or could be in `message`, with its path.
void EachText(
    Message* message, const std::string& path,
    const std::function<void(Message*, const FieldDescriptor*, const std::string&)>& visit) {
  const auto* descriptor = message->GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* field = descriptor->field(i);
    const std::string name = path.empty() ? field->name() : absl::StrCat(path, ".", field->name());
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
      visit(message, field, name);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && !field->is_repeated() &&
               message->GetReflection()->HasField(*message, field)) {
      EachText(message->GetReflection()->MutableMessage(message, field), name, visit);
    }
  }
}

v1::JobSpec Full() {
  return Normalised({"checkpoint={dir: ckpt, interval_steps: 5}",
                     "eval={data: [val], interval_steps: 5}",
                     "sample={prompts: [once], interval_steps: 5}", "scheduler={type: cosine}",
                     "model.init_from=/models/tiny"});
}

std::string Without(const std::string& path, v1::JobSpec spec, const std::string& text) {
  EachText(&spec, "", [&](Message* message, const FieldDescriptor* field, const std::string& name) {
    if (name != path) return;
    const auto* reflection = message->GetReflection();
    if (field->is_repeated()) {
      reflection->ClearField(message, field);
      reflection->AddString(message, field, text);
    } else {
      reflection->SetString(message, field, text);
    }
  });
  const absl::Status status = NormaliseJobSpec(&spec);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << path << ": " << status;
  return std::string(status.message());
}

TEST(HostileTexts, EveryTextOfASpecificationIsBoundedAndItsRefusalIsShortAndPrintable) {
  v1::JobSpec full = Full();
  std::vector<std::string> paths;
  EachText(&full, "", [&](Message*, const FieldDescriptor*, const std::string& name) {
    paths.push_back(name);
  });
  EXPECT_GE(paths.size(), 12u);
  for (const std::string& path : paths) {
    std::vector<std::string> texts = {std::string(1000000, 'a')};
    if (path != "sample.prompts") {  // a text that may hold anything
      texts.insert(texts.end(), {std::string("a\0b", 3), "a\nb", "\x1b[2J",
                                 std::string("/etc/passwd\0.txt", 16)});
    }
    for (const std::string& text : texts) {
      const std::string message = Without(path, full, text);
      EXPECT_LT(message.size(), 2000u) << path;
      EXPECT_TRUE(std::none_of(message.begin(), message.end(),
                               [](unsigned char c) { return absl::ascii_iscntrl(c); }))
          << path << ": " << message;
    }
  }
}

TEST(HostileTexts, NamesThatLeadElsewhereAreRefused) {
  for (const std::string& name :
       {std::string("../../etc"), std::string("/etc"), std::string("a/../b"), std::string("."),
        std::string("a\0b", 3), std::string("<script>"), std::string("a\"b"), std::string("a\\b"),
        std::string("\xe2\x80\xae"
                    "gpj"),
        std::string(1000000, 'n')}) {
    v1::JobSpec spec = Full();
    spec.set_name(name);
    EXPECT_TRUE(absl::IsInvalidArgument(NormaliseJobSpec(&spec))) << name.substr(0, 20);
  }
}

}  // namespace
}  // namespace zeroshard
