// Rendered Kubernetes objects, and what the policy checks ask of them.
#pragma once

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace zeroshard::kubernetes {

using Labels = std::map<std::string, std::string>;

// What lies under keys and places of lists, "spec/containers/0/image"; null where it is not there.
YAML::Node At(const YAML::Node& node, const std::string& path);
// Nothing where there is none.
std::string Text(const YAML::Node& node);
std::vector<std::string> Texts(const YAML::Node& list);
Labels LabelsOf(const YAML::Node& map);
// Of matchLabels and matchExpressions (In alone is known). An empty selector selects everything.
bool Selects(const YAML::Node& selector, const Labels& labels);
// "512Mi", "7GiB" (as our flags say it), "2", in bytes; nothing where it is none of these.
std::optional<uint64_t> Bytes(const std::string& quantity);

// What makes pods: a StatefulSet, a Deployment or a Job.
struct Workload {
  std::string kind;
  std::string name;
  YAML::Node object;
  YAML::Node pod;  // the template's spec
  Labels labels;   // the pods'

  std::string component() const;
};

class Objects {
 public:
  // Of one rendered file. Throws YAML::Exception where it is not YAML.
  explicit Objects(const std::string& path);

  std::vector<YAML::Node> OfKind(const std::string& kind) const;
  // A null node where there is none.
  YAML::Node Find(const std::string& kind, const std::string& name) const;
  const std::vector<Workload>& workloads() const { return workloads_; }

 private:
  std::vector<YAML::Node> objects_;
  std::vector<Workload> workloads_;
};

// Notes "OBJECT: what is wrong".
using Complain = std::function<void(const std::string& object, const std::string& what)>;

// Users, file systems, capabilities, resources, probes, volumes, environment, shutdown.
void CheckPods(const Objects& objects, const Complain& complain);
// Services, disruption budgets and network policies.
void CheckNetwork(const Objects& objects, const Complain& complain);
// What no schema is published for with Kubernetes: certificates, monitors; and dashboards.
void CheckExtensions(const Objects& objects, const Complain& complain);
// That for each NAME.yml of the folder there is a PrometheusRule zeroshard-NAME with that content,
// and no other. Throws YAML::Exception where a file is not YAML, filesystem_error without a folder.
void CheckRules(const Objects& objects, const std::string& folder, const Complain& complain);

}  // namespace zeroshard::kubernetes
