#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/deploy/kubernetes/objects.h"

namespace zeroshard::kubernetes {
namespace {

// Beside what it is told to wait for a checkpoint, a daemon takes this long to end, in seconds:
// --help of zeroshard-store; kStop and kGoodbye of a worker.
const std::map<std::string, int> kEndSeconds = {{"store", 12}, {"worker", 22}};

struct Pod {
  const Objects& objects;
  const Workload& workload;
  const Complain& complain;

  bool daemon() const { return workload.kind == "StatefulSet"; }
  void Say(const std::string& what) const {
    complain(absl::StrCat(workload.kind, "/", workload.name), what);
  }
  void Expect(bool holds, const std::string& what) const {
    if (!holds) Say(what);
  }
};

void CheckPodSecurity(const Pod& pod) {
  const YAML::Node& spec = pod.workload.pod;
  const YAML::Node security = At(spec, "securityContext");
  pod.Expect(Text(At(security, "runAsNonRoot")) == "true", "runAsNonRoot is not true");
  int user = 0;
  pod.Expect(absl::SimpleAtoi(Text(At(security, "runAsUser")), &user) && user > 0,
             "runAsUser names no user but root");
  pod.Expect(Text(At(security, "seccompProfile/type")) == "RuntimeDefault",
             "seccompProfile is not RuntimeDefault");
  pod.Expect(Text(At(spec, "automountServiceAccountToken")) == "false",
             "the service account's token is mounted");
  pod.Expect(pod.objects.Find("ServiceAccount", Text(At(spec, "serviceAccountName"))).IsMap(),
             "there is no such service account");
  for (const char* shared : {"hostNetwork", "hostPID", "hostIPC"}) {
    pod.Expect(Text(At(spec, shared)) != "true", absl::StrCat(shared, " is true"));
  }
}

void CheckContainerSecurity(const Pod& pod, const YAML::Node& container) {
  const YAML::Node security = At(container, "securityContext");
  pod.Expect(Text(At(security, "readOnlyRootFilesystem")) == "true",
             "the root file system is writable");
  pod.Expect(Text(At(security, "allowPrivilegeEscalation")) == "false", "privileges may be gained");
  pod.Expect(Text(At(security, "privileged")) != "true", "a container is privileged");
  pod.Expect(Texts(At(security, "capabilities/drop")) == std::vector<std::string>{"ALL"} &&
                 At(security, "capabilities/add").IsNull(),
             "capabilities are left");
  for (const char* kind : {"requests", "limits"}) {
    for (const char* what : {"cpu", "memory"}) {
      pod.Expect(!Text(At(container, absl::StrCat("resources/", kind, "/", what))).empty(),
                 absl::StrCat("resources.", kind, " has no ", what));
    }
  }
  const std::string image = Text(At(container, "image"));
  const size_t colon = image.rfind(':');
  const std::string tag = colon == std::string::npos ? "" : image.substr(colon + 1);
  pod.Expect(!tag.empty() && tag != "latest" && tag.find('/') == std::string::npos,
             absl::StrCat("the image ", image, " has no tag of one version"));
}

void CheckVolumes(const Pod& pod, const YAML::Node& container) {
  std::set<std::string> there, mounted;
  const YAML::Node volumes = At(pod.workload.pod, "volumes");
  if (!volumes.IsNull()) {
    for (const YAML::Node& volume : volumes) {
      there.insert(Text(At(volume, "name")));
      const std::string claim = Text(At(volume, "persistentVolumeClaim/claimName"));
      pod.Expect(claim.empty() || pod.objects.Find("PersistentVolumeClaim", claim).IsMap(),
                 absl::StrCat("there is no claim ", claim));
      const std::string map = Text(At(volume, "configMap/name"));
      pod.Expect(map.empty() || pod.objects.Find("ConfigMap", map).IsMap(),
                 absl::StrCat("there is no ConfigMap ", map));
    }
  }
  const YAML::Node templates = At(pod.workload.object, "spec/volumeClaimTemplates");
  if (!templates.IsNull()) {
    for (const YAML::Node& claim : templates) there.insert(Text(At(claim, "metadata/name")));
  }
  for (const YAML::Node& mount : At(container, "volumeMounts"))
    mounted.insert(Text(At(mount, "name")));
  pod.Expect(there == mounted, "its volumes are not those that it mounts");
}

// Everything that $(NAME) may stand for; values where they are known here.
std::map<std::string, std::string> EnvironmentOf(const Pod& pod, const YAML::Node& container) {
  std::map<std::string, std::string> environment;
  const YAML::Node sources = At(container, "envFrom");
  if (!sources.IsNull()) {
    for (const YAML::Node& source : sources) {
      const std::string name = Text(At(source, "configMapRef/name"));
      const YAML::Node map = pod.objects.Find("ConfigMap", name);
      pod.Expect(map.IsMap(), absl::StrCat("there is no ConfigMap ", name));
      if (map.IsMap()) environment = LabelsOf(At(map, "data"));
    }
  }
  const YAML::Node own = At(container, "env");
  if (!own.IsNull()) {
    for (const YAML::Node& entry : own) {
      // Not $(...) of its own: what the field is told to be is known to the cluster alone.
      environment[Text(At(entry, "name"))] =
          absl::StrReplaceAll(Text(At(entry, "value")), {{"$(", "("}});
    }
  }
  return environment;
}

// --flag=value by flag, with $(NAME) replaced.
std::map<std::string, std::string> FlagsOf(const Pod& pod, const YAML::Node& container,
                                           const std::map<std::string, std::string>& environment) {
  std::map<std::string, std::string> flags;
  for (std::string text : Texts(At(container, "args"))) {
    for (const auto& [name, value] : environment) {
      text = absl::StrReplaceAll(text, {{absl::StrCat("$(", name, ")"), value}});
    }
    pod.Expect(!absl::StrContains(text, "$("), absl::StrCat(text, " names an unknown variable"));
    const size_t equals = text.find('=');
    flags[text.substr(0, equals)] = equals == std::string::npos ? "" : text.substr(equals + 1);
  }
  return flags;
}

int PortNamed(const YAML::Node& container, const std::string& name) {
  for (const YAML::Node& port : At(container, "ports")) {
    if (Text(At(port, "name")) == name) return At(port, "containerPort").as<int>();
  }
  return 0;
}

void CheckProbes(const Pod& pod, const YAML::Node& container,
                 const std::map<std::string, std::string>& flags) {
  for (const auto& [flag, port] : {std::pair{"--listen", "grpc"},
                                   {"--metrics-listen", "metrics"},
                                   {"--health-listen", "health"}}) {
    const auto found = flags.find(flag);
    pod.Expect(found != flags.end() &&
                   found->second == absl::StrCat("0.0.0.0:", PortNamed(container, port)),
               absl::StrCat(flag, " is not the port named ", port));
  }
  for (const auto& [name, service] :
       {std::pair{"startupProbe", ""}, {"livenessProbe", ""}, {"readinessProbe", "ready"}}) {
    const YAML::Node probe = At(container, name);
    pod.Expect(!probe.IsNull() && !At(probe, "grpc").IsNull() &&
                   Text(At(probe, "grpc/port")) == absl::StrCat(PortNamed(container, "health")),
               absl::StrCat(name, " does not ask the health port"));
    pod.Expect(Text(At(probe, "grpc/service")) == service,
               absl::StrCat(name, " does not ask for service \"", service, "\""));
  }
  const YAML::Node startup = At(container, "startupProbe");
  int period = 0, failures = 0;
  pod.Expect(absl::SimpleAtoi(Text(At(startup, "periodSeconds")), &period) &&
                 absl::SimpleAtoi(Text(At(startup, "failureThreshold")), &failures) &&
                 period * failures >= 300,
             "startupProbe waits less than five minutes");
}

void CheckShutdown(const Pod& pod, const std::map<std::string, std::string>& flags) {
  int grace = 0;
  pod.Expect(
      absl::SimpleAtoi(Text(At(pod.workload.pod, "terminationGracePeriodSeconds")), &grace) &&
          grace > 0,
      "terminationGracePeriodSeconds is not said");
  const auto end = kEndSeconds.find(pod.workload.component());
  if (end == kEndSeconds.end()) return;
  const auto flag = flags.find("--shutdown-grace");
  int shutdown = 0;
  const bool said = flag != flags.end() && absl::SimpleAtoi(flag->second, &shutdown);
  pod.Expect(
      said && grace >= shutdown + end->second,
      absl::StrCat("terminationGracePeriodSeconds ", grace, " is less than --shutdown-grace ",
                   shutdown, " and ", end->second, " to end"));
}

void CheckStore(const Pod& pod, const YAML::Node& container,
                const std::map<std::string, std::string>& flags) {
  const auto own = flags.find("--memory-limit");
  const auto taken = Bytes(own == flags.end() ? "" : own->second);
  const auto limit = Bytes(Text(At(container, "resources/limits/memory")));
  pod.Expect(taken && limit && *taken < *limit,
             "--memory-limit is not below the container's limit");
  const auto nvme = flags.find("--nvme-limit");
  const auto most = Bytes(nvme == flags.end() ? "" : nvme->second);
  const YAML::Node claim = At(pod.workload.object, "spec/volumeClaimTemplates/0/spec");
  const auto size = Bytes(Text(At(claim, "resources/requests/storage")));
  pod.Expect(most && size && *most < *size, "--nvme-limit is not below the volume's size");
}

void CheckDaemon(const Pod& pod) {
  const Workload& workload = pod.workload;
  const YAML::Node spec = At(workload.object, "spec");
  const YAML::Node service = pod.objects.Find("Service", Text(At(spec, "serviceName")));
  pod.Expect(service.IsMap() && Text(At(service, "spec/clusterIP")) == "None" &&
                 Text(At(service, "spec/publishNotReadyAddresses")) == "true",
             "its Service is not headless or hides pods that are not ready");
  pod.Expect(pod.objects.Find("PriorityClass", Text(At(workload.pod, "priorityClassName"))).IsMap(),
             "there is no such priority class");
  pod.Expect(Selects(At(spec, "selector"), workload.labels), "it does not select its own pods");
  const std::string component = workload.component();
  if (component == "coordinator") return;
  pod.Expect(Text(At(spec, "podManagementPolicy")) == "Parallel",
             "its pods start one after another");
  const YAML::Node spread = At(workload.pod, "topologySpreadConstraints");
  pod.Expect(!spread.IsNull() && spread.size() == 1 &&
                 Selects(At(spread, "0/labelSelector"), workload.labels),
             "its pods are not spread over hosts");
}

}  // namespace

void CheckPods(const Objects& objects, const Complain& complain) {
  std::set<std::string> daemons;
  for (const Workload& workload : objects.workloads()) {
    const Pod pod{objects, workload, complain};
    CheckPodSecurity(pod);
    pod.Expect(
        At(workload.pod, "containers").size() == 1 && At(workload.pod, "initContainers").IsNull(),
        "it has more than one container: say here what holds of the others");
    const YAML::Node container = At(workload.pod, "containers/0");
    CheckContainerSecurity(pod, container);
    CheckVolumes(pod, container);
    const auto flags = FlagsOf(pod, container, EnvironmentOf(pod, container));
    if (!pod.daemon()) continue;
    daemons.insert(workload.component());
    CheckDaemon(pod);
    CheckProbes(pod, container, flags);
    CheckShutdown(pod, flags);
    if (workload.component() == "store") CheckStore(pod, container, flags);
  }
  if (daemons != std::set<std::string>{"coordinator", "store", "worker"}) {
    complain("all", "there is not one StatefulSet of each: coordinator, store, worker");
  }
}

}  // namespace zeroshard::kubernetes
