// The documents of a YAML text.
#pragma once

#include <yaml-cpp/yaml.h>

#include <optional>
#include <string>

namespace zeroshard {

struct YamlDocuments {
  std::optional<YAML::Node> first;   // none in an empty text
  std::optional<YAML::Mark> second;  // where another one begins
};

// Reads the first document and looks whether another one follows. Stops there, because behind
// the last bracket yaml-cpp 0.7 finds empty documents without end at a comma. Throws
// YAML::Exception.
YamlDocuments LoadYaml(const std::string& text);

}  // namespace zeroshard
