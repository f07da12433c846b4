#include "tests/deploy/kubernetes/objects.h"

#include <algorithm>
#include <cctype>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace zeroshard::kubernetes {

YAML::Node At(const YAML::Node& node, const std::string& path) {
  YAML::Node at(node);
  for (const std::string& key : std::vector<std::string>(absl::StrSplit(path, '/'))) {
    const YAML::Node parent(at);  // a const one makes no keys
    size_t index = 0;
    const bool list = parent.IsSequence() && absl::SimpleAtoi(key, &index);
    if (!list && !parent.IsMap()) return YAML::Node(YAML::NodeType::Null);
    const YAML::Node child = list ? parent[index] : parent[key];
    if (!child.IsDefined()) return YAML::Node(YAML::NodeType::Null);
    at.reset(child);
  }
  return at;
}

std::string Text(const YAML::Node& node) {
  return !node.IsNull() && node.IsScalar() ? node.as<std::string>() : "";
}

std::vector<std::string> Texts(const YAML::Node& list) {
  std::vector<std::string> texts;
  if (list.IsNull()) return texts;
  for (const YAML::Node& entry : list) texts.push_back(Text(entry));
  return texts;
}

Labels LabelsOf(const YAML::Node& map) {
  Labels labels;
  if (map.IsNull()) return labels;
  for (const auto& entry : map) labels[Text(entry.first)] = Text(entry.second);
  return labels;
}

bool Selects(const YAML::Node& selector, const Labels& labels) {
  const auto value = [&labels](const std::string& key) {
    const auto found = labels.find(key);
    return found == labels.end() ? std::string() : found->second;
  };
  for (const auto& [key, wanted] : LabelsOf(At(selector, "matchLabels"))) {
    if (value(key) != wanted) return false;
  }
  const YAML::Node expressions = At(selector, "matchExpressions");
  if (expressions.IsNull()) return true;
  for (const YAML::Node& expression : expressions) {
    const std::vector<std::string> values = Texts(At(expression, "values"));
    if (Text(At(expression, "operator")) != "In") return false;
    if (std::find(values.begin(), values.end(), value(Text(At(expression, "key")))) ==
        values.end()) {
      return false;
    }
  }
  return true;
}

std::optional<uint64_t> Bytes(const std::string& quantity) {
  size_t digits = 0;
  while (digits < quantity.size() && std::isdigit(static_cast<unsigned char>(quantity[digits]))) {
    ++digits;
  }
  if (digits == 0 || digits > 12) return std::nullopt;
  const uint64_t number = std::stoull(quantity.substr(0, digits));
  static const std::map<std::string, int> kShifts = {
      {"", 0}, {"Ki", 10}, {"Mi", 20}, {"Gi", 30}, {"Ti", 40}, {"MiB", 20}, {"GiB", 30}};
  const auto shift = kShifts.find(quantity.substr(digits));
  if (shift == kShifts.end()) return std::nullopt;
  return number << shift->second;
}

std::string Workload::component() const {
  const auto found = labels.find("app.kubernetes.io/component");
  return found == labels.end() ? "" : found->second;
}

Objects::Objects(const std::string& path) {
  for (const YAML::Node& object : YAML::LoadAllFromFile(path)) {
    if (!object.IsMap()) continue;
    objects_.push_back(object);
    const YAML::Node pod = At(object, "spec/template");
    if (pod.IsNull() || !pod.IsMap()) continue;
    workloads_.push_back({Text(At(object, "kind")), Text(At(object, "metadata/name")), object,
                          At(pod, "spec"), LabelsOf(At(pod, "metadata/labels"))});
  }
}

std::vector<YAML::Node> Objects::OfKind(const std::string& kind) const {
  std::vector<YAML::Node> found;
  for (const YAML::Node& object : objects_) {
    if (Text(At(object, "kind")) == kind) found.push_back(object);
  }
  return found;
}

YAML::Node Objects::Find(const std::string& kind, const std::string& name) const {
  for (const YAML::Node& object : OfKind(kind)) {
    if (Text(At(object, "metadata/name")) == name) return object;
  }
  return YAML::Node(YAML::NodeType::Null);
}

}  // namespace zeroshard::kubernetes
