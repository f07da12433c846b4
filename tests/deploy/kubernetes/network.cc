#include <set>
#include <tuple>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/deploy/kubernetes/objects.h"

namespace zeroshard::kubernetes {
namespace {

// A port that Gloo or NCCL may have taken.
constexpr int kAnyPort = 50000;

bool OpensPort(const YAML::Node& rule, const std::string& protocol, int port) {
  if (At(rule, "ports").IsNull()) return true;
  for (const YAML::Node& entry : At(rule, "ports")) {
    const int first = At(entry, "port").as<int>();
    const int last = !At(entry, "endPort").IsNull() ? At(entry, "endPort").as<int>() : first;
    if (Text(At(entry, "protocol")) == protocol && first <= port && port <= last) return true;
  }
  return false;
}

// Whether one of the peers is this pod of the same namespace. No list of peers: everybody.
bool NamesPod(const YAML::Node& peers, const Labels& pod) {
  if (peers.IsNull()) return true;
  for (const YAML::Node& peer : peers) {
    if (!At(peer, "namespaceSelector").IsNull() || !At(peer, "ipBlock").IsNull()) continue;
    if (Selects(At(peer, "podSelector"), pod)) return true;
  }
  return false;
}

bool NamesNamespace(const YAML::Node& peers, const std::string& name) {
  if (peers.IsNull()) return true;
  for (const YAML::Node& peer : peers) {
    if (!At(peer, "namespaceSelector").IsNull() &&
        Selects(At(peer, "namespaceSelector"), {{"kubernetes.io/metadata.name", name}})) {
      return true;
    }
  }
  return false;
}

struct Direction {
  const char* rules;  // "ingress"
  const char* peers;  // "from"
};
constexpr Direction kIngress = {"ingress", "from"};
constexpr Direction kEgress = {"egress", "to"};

// Whether a policy for `pod` has a rule with such a port whose peers are as asked.
template <typename Peers>
bool Allows(const Objects& objects, const Labels& pod, const Direction& direction,
            const std::string& protocol, int port, const Peers& peers) {
  for (const YAML::Node& policy : objects.OfKind("NetworkPolicy")) {
    if (!Selects(At(policy, "spec/podSelector"), pod)) continue;
    const YAML::Node rules = At(policy, absl::StrCat("spec/", direction.rules));
    if (rules.IsNull()) continue;
    for (const YAML::Node& rule : rules) {
      if (OpensPort(rule, protocol, port) && peers(At(rule, direction.peers))) return true;
    }
  }
  return false;
}

Labels PodOf(const std::string& component) {
  return {{"app.kubernetes.io/name", "zeroshard"}, {"app.kubernetes.io/component", component}};
}

// The whole of who may call whom, at both ends.
void CheckCalls(const Objects& objects, const Complain& complain) {
  using Call = std::tuple<std::string, std::string, int>;
  std::set<Call> wanted = {{"client", "coordinator", 7070},
                           {"store", "coordinator", 7070},
                           {"worker", "coordinator", 7070},
                           {"store", "store", 7070},
                           {"worker", "store", 7070}};
  const std::vector<int> ports = {22, 443, 7070, 7071, 7072, kAnyPort};
  for (const int port : ports) {
    if (port >= 1024) wanted.insert({"worker", "worker", port});
  }
  const std::vector<std::string> components = {"client", "coordinator", "store", "worker", "other"};
  for (const std::string& from : components) {
    for (const std::string& to : components) {
      for (const int port : ports) {
        const bool want = wanted.contains({from, to, port});
        const bool out =
            Allows(objects, PodOf(from), kEgress, "TCP", port,
                   [&](const YAML::Node& peers) { return NamesPod(peers, PodOf(to)); });
        const bool in =
            Allows(objects, PodOf(to), kIngress, "TCP", port,
                   [&](const YAML::Node& peers) { return NamesPod(peers, PodOf(from)); });
        if (out == want && in == want) continue;
        complain("NetworkPolicy",
                 absl::StrCat(from, " to ", to, " port ", port, ": leaving is ",
                              out ? "open" : "closed", ", arriving ", in ? "open" : "closed",
                              ", wanted ", want ? "open" : "closed"));
      }
    }
  }
}

void CheckOthers(const Objects& objects, const Complain& complain) {
  const YAML::Node deny = objects.Find("NetworkPolicy", "default-deny");
  if (!deny.IsMap() || At(deny, "spec/podSelector").size() != 0 ||
      Texts(At(deny, "spec/policyTypes")) != std::vector<std::string>{"Ingress", "Egress"} ||
      !At(deny, "spec/ingress").IsNull() || !At(deny, "spec/egress").IsNull()) {
    complain("NetworkPolicy/default-deny", "it does not deny everything to all pods");
  }
  for (const char* component : {"client", "coordinator", "store", "worker"}) {
    const Labels pod = PodOf(component);
    for (const char* protocol : {"TCP", "UDP"}) {
      if (!Allows(objects, pod, kEgress, protocol, 53,
                  [](const YAML::Node& peers) { return NamesNamespace(peers, "kube-system"); })) {
        complain("NetworkPolicy", absl::StrCat(component, " cannot look up names by ", protocol));
      }
    }
    for (const int port : {7070, 7071, 7072, kAnyPort}) {
      const bool open = Allows(objects, pod, kIngress, "TCP", port, [](const YAML::Node& peers) {
        return NamesNamespace(peers, "monitoring") || NamesNamespace(peers, "another");
      });
      const bool scraped = port == 7071 && std::string(component) != "client";
      if (open != scraped) {
        complain("NetworkPolicy",
                 absl::StrCat(component, " port ", port, " from other namespaces"));
      }
    }
  }
}

// Each port that a Service names leads to one of its pods that somebody may call, and each port
// that a policy opens alone (not a range) is named by a Service of the pods.
void CheckServices(const Objects& objects, const Complain& complain) {
  std::set<std::pair<std::string, int>> named, opened;  // component and port
  for (const YAML::Node& service : objects.OfKind("Service")) {
    const std::string name = absl::StrCat("Service/", Text(At(service, "metadata/name")));
    YAML::Node selector(YAML::NodeType::Map);
    selector.force_insert("matchLabels", At(service, "spec/selector"));
    bool selects = false;
    for (const Workload& workload : objects.workloads()) {
      if (!Selects(selector, workload.labels)) continue;
      selects = true;
      for (const YAML::Node& port : At(service, "spec/ports")) {
        bool there = false;
        for (const YAML::Node& own : At(workload.pod, "containers/0/ports")) {
          if (Text(At(own, "name")) != Text(At(port, "targetPort"))) continue;
          there = Text(At(own, "containerPort")) == Text(At(port, "port"));
          named.insert({workload.component(), At(own, "containerPort").as<int>()});
        }
        if (!there)
          complain(name, absl::StrCat("no container port is its ", Text(At(port, "name"))));
      }
    }
    if (!selects) complain(name, "it selects no pod");
  }
  for (const Workload& workload : objects.workloads()) {
    for (const YAML::Node& policy : objects.OfKind("NetworkPolicy")) {
      if (!Selects(At(policy, "spec/podSelector"), workload.labels)) continue;
      const YAML::Node rules = At(policy, "spec/ingress");
      if (rules.IsNull()) continue;
      for (const YAML::Node& rule : rules) {
        for (const YAML::Node& port : At(rule, "ports")) {
          if (At(port, "endPort").IsNull()) {
            opened.insert({workload.component(), At(port, "port").as<int>()});
          }
        }
      }
    }
  }
  if (named != opened) {
    complain("NetworkPolicy", "the ports that are opened are not those that Services name");
  }
}

void CheckBudgets(const Objects& objects, const Complain& complain) {
  std::set<std::string> covered;
  for (const YAML::Node& budget : objects.OfKind("PodDisruptionBudget")) {
    bool selects = false;
    for (const Workload& workload : objects.workloads()) {
      if (!Selects(At(budget, "spec/selector"), workload.labels)) continue;
      selects = true;
      covered.insert(workload.component());
    }
    const std::string name =
        absl::StrCat("PodDisruptionBudget/", Text(At(budget, "metadata/name")));
    if (!selects) complain(name, "it selects no pod");
    if (Text(At(budget, "spec/maxUnavailable")) != "1") complain(name, "it lets more than one go");
  }
  if (covered != std::set<std::string>{"coordinator", "store", "worker"}) {
    complain("PodDisruptionBudget", "not every kind of daemon has one of its own");
  }
}

}  // namespace

void CheckNetwork(const Objects& objects, const Complain& complain) {
  CheckServices(objects, complain);
  CheckBudgets(objects, complain);
  CheckCalls(objects, complain);
  CheckOthers(objects, complain);
}

}  // namespace zeroshard::kubernetes
