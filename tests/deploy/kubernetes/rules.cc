// PrometheusRules say what the rule files of deploy/prometheus say.
#include <filesystem>
#include <map>

#include "absl/strings/str_cat.h"
#include "tests/deploy/kubernetes/objects.h"

namespace zeroshard::kubernetes {
namespace {

// Where two documents differ first, "groups/0/rules/2/expr"; nothing where they say the same. The
// order of a map's keys and how a text is quoted do not count.
std::optional<std::string> Difference(const YAML::Node& a, const YAML::Node& b) {
  if (a.Type() != b.Type()) return "";
  if (a.IsScalar()) return a.Scalar() == b.Scalar() ? std::nullopt : std::optional<std::string>("");
  if (!a.IsMap() && !a.IsSequence()) return std::nullopt;
  std::map<std::string, YAML::Node> left, right;
  for (const auto& [parts, node] : {std::pair{&left, a}, std::pair{&right, b}}) {
    size_t place = 0;
    for (const auto& item : node) {
      const std::string key = node.IsMap() ? item.first.Scalar() : absl::StrCat(place++);
      parts->emplace(key, node.IsMap() ? item.second : item);
    }
  }
  for (const auto& [key, node] : left) {
    const auto other = right.find(key);
    if (other == right.end()) return key;
    if (const auto below = Difference(node, other->second)) return absl::StrCat(key, "/", *below);
    right.erase(other);
  }
  return right.empty() ? std::nullopt : std::optional<std::string>(right.begin()->first);
}

}  // namespace

void CheckRules(const Objects& objects, const std::string& folder, const Complain& complain) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".yml") continue;
    ++files;
    const std::string name = absl::StrCat("zeroshard-", entry.path().stem().string());
    const YAML::Node object = objects.Find("PrometheusRule", name);
    if (!object.IsMap()) {
      complain(absl::StrCat("PrometheusRule/", name),
               absl::StrCat("it is not there, but ", entry.path().string(), " is"));
      continue;
    }
    if (Text(At(object, "apiVersion")) != "monitoring.coreos.com/v1") {
      complain(absl::StrCat("PrometheusRule/", name), "apiVersion is not monitoring.coreos.com/v1");
    }
    if (const auto where = Difference(YAML::LoadFile(entry.path()), At(object, "spec"))) {
      complain(
          absl::StrCat("PrometheusRule/", name),
          absl::StrCat("its spec is not ", entry.path().string(), ": they differ at ", *where));
    }
  }
  if (files == 0) complain(folder, "there are no rules in it");
  if (objects.OfKind("PrometheusRule").size() > files) {
    complain(folder, "there are more PrometheusRules than files in it");
  }
}

}  // namespace zeroshard::kubernetes
