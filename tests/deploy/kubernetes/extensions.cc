#include <algorithm>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/deploy/kubernetes/objects.h"

namespace zeroshard::kubernetes {
namespace {

std::string NameOf(const YAML::Node& object) {
  return absl::StrCat(Text(At(object, "kind")), "/", Text(At(object, "metadata/name")));
}

void CheckVersion(const YAML::Node& object, const std::string& wanted, const Complain& complain) {
  const std::string seen = Text(At(object, "apiVersion"));
  if (seen != wanted) complain(NameOf(object), absl::StrCat("apiVersion ", seen, ", not ", wanted));
}

// As common/security/identity.h reads them.
void CheckCertificates(const Objects& objects, const Complain& complain) {
  std::set<std::string> secrets;
  for (const YAML::Node& issuer : objects.OfKind("Issuer")) {
    CheckVersion(issuer, "cert-manager.io/v1", complain);
  }
  for (const YAML::Node& certificate : objects.OfKind("Certificate")) {
    CheckVersion(certificate, "cert-manager.io/v1", complain);
    const YAML::Node spec = At(certificate, "spec");
    const std::string name = Text(At(certificate, "metadata/name"));
    const std::string secret = Text(At(spec, "secretName"));
    if (secret.empty() || !secrets.insert(secret).second) {
      complain(NameOf(certificate), "it has no secret of its own");
    }
    if (!objects.Find("Issuer", Text(At(spec, "issuerRef/name"))).IsMap()) {
      complain(NameOf(certificate), "there is no such issuer");
    }
    if (Text(At(spec, "isCA")) == "true") continue;
    const std::string role = name.substr(name.rfind('-') + 1);
    if (Texts(At(spec, "uris")) != std::vector<std::string>{"spiffe://zeroshard/" + role}) {
      complain(NameOf(certificate), "its URI is not the role that its name says");
    }
    const std::vector<std::string> usages = Texts(At(spec, "usages"));
    const auto has = [&usages](const char* usage) {
      return std::find(usages.begin(), usages.end(), usage) != usages.end();
    };
    if (!has("client auth") || has("server auth") == (role == "client")) {
      complain(NameOf(certificate), "its usages are not those of its role");
    }
  }
  for (const Workload& workload : objects.workloads()) {
    if (At(workload.pod, "volumes").IsNull()) continue;
    for (const YAML::Node& volume : At(workload.pod, "volumes")) {
      const std::string secret = Text(At(volume, "secret/secretName"));
      if (secret.empty()) continue;
      if (secret != absl::StrCat("zeroshard-", workload.component(), "-tls") ||
          !secrets.contains(secret)) {
        complain(workload.name, absl::StrCat("the secret ", secret, " is no certificate for it"));
      }
    }
  }
}

// Pods or Services that a monitor selects, and that their port is there.
template <typename Objects, typename Has>
void CheckMonitor(const YAML::Node& monitor, const YAML::Node& endpoints, const Objects& objects,
                  const Has& has, const Complain& complain) {
  CheckVersion(monitor, "monitoring.coreos.com/v1", complain);
  if (endpoints.IsNull() || endpoints.size() == 0) complain(NameOf(monitor), "no endpoint");
  for (const YAML::Node& endpoint : endpoints) {
    if (Text(At(endpoint, "honorLabels")) != "true") {
      complain(NameOf(monitor), "the scrape's labels would hide the job's");
    }
    bool selects = false;
    for (const auto& object : objects) selects |= has(object, Text(At(endpoint, "port")));
    if (!selects) complain(NameOf(monitor), "it selects nothing with that port");
  }
}

bool HasPort(const YAML::Node& ports, const std::string& name) {
  for (const YAML::Node& port : ports) {
    if (Text(At(port, "name")) == name) return true;
  }
  return false;
}

void CheckMonitors(const Objects& objects, const Complain& complain) {
  for (const YAML::Node& monitor : objects.OfKind("ServiceMonitor")) {
    const YAML::Node selector = At(monitor, "spec/selector");
    CheckMonitor(
        monitor, At(monitor, "spec/endpoints"), objects.OfKind("Service"),
        [&](const YAML::Node& service, const std::string& port) {
          return Selects(selector, LabelsOf(At(service, "metadata/labels"))) &&
                 HasPort(At(service, "spec/ports"), port);
        },
        complain);
  }
  for (const YAML::Node& monitor : objects.OfKind("PodMonitor")) {
    const YAML::Node selector = At(monitor, "spec/selector");
    CheckMonitor(
        monitor, At(monitor, "spec/podMetricsEndpoints"), objects.workloads(),
        [&](const Workload& workload, const std::string& port) {
          return Selects(selector, workload.labels) &&
                 HasPort(At(workload.pod, "containers/0/ports"), port);
        },
        complain);
  }
}

void CheckDashboards(const Objects& objects, const Complain& complain) {
  for (const YAML::Node& map : objects.OfKind("ConfigMap")) {
    const auto labels = LabelsOf(At(map, "metadata/labels"));
    const auto label = labels.find("grafana_dashboard");
    if (label == labels.end()) continue;
    if (label->second != "1") complain(NameOf(map), "grafana_dashboard is not \"1\"");
    bool any = false;
    for (const auto& [file, content] : LabelsOf(At(map, "data"))) {
      any |= absl::EndsWith(file, ".json") && absl::StrContains(content, "\"panels\"");
    }
    if (!any) complain(NameOf(map), "there is no dashboard in it");
  }
}

}  // namespace

void CheckExtensions(const Objects& objects, const Complain& complain) {
  CheckCertificates(objects, complain);
  CheckMonitors(objects, complain);
  CheckDashboards(objects, complain);
}

}  // namespace zeroshard::kubernetes
