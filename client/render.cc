#include "client/render.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "client/console.h"
#include "client/mesh_view.h"

namespace zeroshard {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using Json = nlohmann::ordered_json;

Json NumberOrNull(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

// `index` is -1 for a singular field.
Json ValueOf(const Message& message, const FieldDescriptor* field, int index) {
  const auto* r = message.GetReflection();
  const bool one = index < 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return one ? r->GetBool(message, field) : r->GetRepeatedBool(message, field, index);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return NumberOrNull(one ? r->GetDouble(message, field)
                              : r->GetRepeatedDouble(message, field, index));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return NumberOrNull(one ? r->GetFloat(message, field)
                              : r->GetRepeatedFloat(message, field, index));
    case FieldDescriptor::CPPTYPE_INT32:
      return one ? r->GetInt32(message, field) : r->GetRepeatedInt32(message, field, index);
    case FieldDescriptor::CPPTYPE_INT64:
      return one ? r->GetInt64(message, field) : r->GetRepeatedInt64(message, field, index);
    case FieldDescriptor::CPPTYPE_UINT32:
      return one ? r->GetUInt32(message, field) : r->GetRepeatedUInt32(message, field, index);
    case FieldDescriptor::CPPTYPE_UINT64:
      return one ? r->GetUInt64(message, field) : r->GetRepeatedUInt64(message, field, index);
    case FieldDescriptor::CPPTYPE_ENUM: {
      const auto* value =
          one ? r->GetEnum(message, field) : r->GetRepeatedEnum(message, field, index);
      absl::string_view name = value->name();
      for (const char* prefix : {"JOB_STATE_", "MEMBER_KIND_", "STORE_PHASE_"}) {
        if (absl::ConsumePrefix(&name, prefix)) break;
      }
      return std::string(name);
    }
    case FieldDescriptor::CPPTYPE_STRING:
      return one ? r->GetString(message, field) : r->GetRepeatedString(message, field, index);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ToJson(one ? r->GetMessage(message, field)
                        : r->GetRepeatedMessage(message, field, index));
  }
  return nullptr;
}

std::string StepOf(const v1::JobStatus& status) {
  return absl::StrCat(status.committed_step(), "/", status.steps());
}

std::string LossOf(const v1::JobStatus& status) {
  return status.has_last() ? absl::StrFormat("%.4f", status.last().loss()) : "-";
}

std::string WhenOf(int64_t unix_ms) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", absl::FromUnixMillis(unix_ms),
                          absl::LocalTimeZone());
}

// Of the state in the stores: epoch and step.
std::string VersionOf(const v1::StateVersion& version) {
  return absl::StrCat(version.epoch(), ".", version.step());
}

// Where the state of an offloaded job is, a line a store.
std::string FormatStores(const v1::JobStatus& status) {
  std::vector<std::vector<std::string>> rows = {{"STORE", "HOST", "PHASE", "VERSION", "GENERATION",
                                                 "CHUNKS", "MASTER", "EXP_AVG", "EXP_AVG_SQ",
                                                 "PARAMETERS", "STAGING", "NVME", "PROBLEM"}};
  for (const v1::StoreStatus& store : status.stores()) {
    const v1::StoreUsage& usage = store.usage();
    rows.push_back(
        {store.member(), store.host(),
         store.phase() == v1::STORE_PHASE_UNSPECIFIED
             ? "-"
             : std::string(absl::StripPrefix(v1::StorePhase_Name(store.phase()), "STORE_PHASE_")),
         VersionOf(store.version()), absl::StrCat(store.generation()), absl::StrCat(usage.chunks()),
         FormatBytes(usage.master_bytes()), FormatBytes(usage.exp_avg_bytes()),
         FormatBytes(usage.exp_avg_sq_bytes()), FormatBytes(usage.parameter_bytes()),
         FormatBytes(usage.staging_bytes()), FormatBytes(usage.nvme_bytes()),
         store.problem().empty() ? "-" : store.problem()});
  }
  return FormatTable(rows);
}

// By tier: "1.2 GB, 30 GB on disk".
std::string HeldBy(const v1::Node& node) {
  std::string text = FormatBytes(node.held_bytes());
  if (node.held_nvme_bytes() != 0) {
    absl::StrAppend(&text, ", ", FormatBytes(node.held_nvme_bytes()), " on disk");
  }
  return text;
}

// Negative: nobody is there to be heard.
std::string AgeOf(int64_t ms) {
  if (ms < 0) return "-";
  return absl::StrFormat("%.1f s ago", static_cast<double>(ms) / 1e3);
}

// Of UTF-8.
size_t Characters(const std::string& text) {
  return std::count_if(text.begin(), text.end(),
                       [](unsigned char c) { return (c & 0xC0) != 0x80; });
}

// What was measured, and by how much that is not what was planned.
std::string Compared(uint64_t measured, uint64_t planned) {
  const std::string text = FormatBytes(measured);
  if (measured == planned) return text;
  if (planned == 0) return absl::StrCat(text, " (not 0)");
  const double off = static_cast<double>(measured) / static_cast<double>(planned) - 1;
  return absl::StrFormat("%s (%+.2g %%)", text, 100 * off);
}

}  // namespace

std::string FormatTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::vector<std::string>> shown = rows;
  std::vector<size_t> widths;
  for (auto& row : shown) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = Shown(row[i], i + 1 < row.size() ? kMostCell : kMostReason);
      widths[i] = std::max(widths[i], Characters(row[i]));
    }
  }
  std::string text;
  for (const auto& row : shown) {
    for (size_t i = 0; i < row.size(); ++i) {
      absl::StrAppend(&text, row[i]);
      if (i + 1 < row.size()) text.append(widths[i] - Characters(row[i]) + 2, ' ');
    }
    text += '\n';
  }
  return text;
}

std::string FormatShardPlans(const std::vector<v1::ShardPlan>& plans,
                             const std::map<uint32_t, v1::RankUsage>& measured) {
  const bool stores = std::any_of(plans.begin(), plans.end(), [](const v1::ShardPlan& plan) {
    return plan.push_bytes_per_step() + plan.pull_bytes_per_step() > 0;
  });
  std::vector<std::vector<std::string>> rows = {
      {"RANK", "OWNS", "", "PARAMETERS", "GRADIENTS", "OPTIMIZER", "ACTIVATIONS", "TRAFFIC/STEP"}};
  if (stores) rows[0].insert(rows[0].end(), {"PUSH/STEP", "PULL/STEP"});
  bool uncounted = false;
  for (const v1::ShardPlan& plan : plans) {
    rows.push_back({absl::StrCat(plan.rank()),
                    FormatCount(static_cast<double>(plan.owned_parameters())), "planned",
                    FormatBytes(plan.parameter_bytes()), FormatBytes(plan.gradient_bytes()),
                    FormatBytes(plan.optimizer_bytes()), FormatBytes(plan.activation_bytes()),
                    FormatBytes(plan.traffic_bytes_per_step())});
    if (stores) {
      rows.back().push_back(FormatBytes(plan.push_bytes_per_step()));
      rows.back().push_back(FormatBytes(plan.pull_bytes_per_step()));
    }
    const auto found = measured.find(plan.rank());
    if (found == measured.end()) continue;
    const v1::RankUsage& usage = found->second;
    const bool stepped = usage.step() != 0;
    const auto moved = [stepped](uint64_t seen, uint64_t planned) {
      return stepped ? Compared(seen, planned) : "-";
    };
    rows.push_back({"", "", "measured", Compared(usage.parameter_bytes(), plan.parameter_bytes()),
                    Compared(usage.gradient_bytes(), plan.gradient_bytes()),
                    Compared(usage.optimizer_bytes(), plan.optimizer_bytes()),
                    Compared(usage.activation_bytes(), plan.activation_bytes()),
                    moved(usage.traffic_bytes(), plan.traffic_bytes_per_step())});
    if (stores) {
      rows.back().push_back(moved(usage.push_bytes(), plan.push_bytes_per_step()));
      rows.back().push_back(moved(usage.pull_bytes(), plan.pull_bytes_per_step()));
    }
    if (!stepped) uncounted = true;
  }
  std::string text = FormatTable(rows);
  if (uncounted) {
    absl::StrAppend(&text,
                    "-: not measured yet; what travels is counted on a whole step without an "
                    "evaluation, sample, checkpoint or waiting\n");
  }
  return text;
}

std::string NameOf(v1::JobState state) {
  return std::string(absl::StripPrefix(v1::JobState_Name(state), "JOB_STATE_"));
}

bool HasEnded(v1::JobState state) {
  return state == v1::JOB_STATE_COMPLETED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED;
}

Json ToJson(const Message& message) {
  Json json = Json::object();
  const auto* descriptor = message.GetDescriptor();
  const auto* reflection = message.GetReflection();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* field = descriptor->field(i);
    if (field->is_repeated()) {
      Json list = Json::array();
      for (int at = 0; at < reflection->FieldSize(message, field); ++at) {
        list.push_back(ValueOf(message, field, at));
      }
      json[field->name()] = std::move(list);
    } else if (!field->has_presence() || reflection->HasField(message, field)) {
      json[field->name()] = ValueOf(message, field, -1);
    }
  }
  return json;
}

std::string JsonLine(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
}

std::string FormatState(const v1::JobStatus& status) {
  return absl::StrCat(Shown(status.run_id(), kMostCell), " ", NameOf(status.state()),
                      status.reason().empty() ? "" : ": ", Shown(status.reason()));
}

std::string FormatJobs(const v1::ListResponse& jobs) {
  if (jobs.jobs().empty()) return "no jobs yet; submit one with zeroshard submit JOB.yaml\n";
  std::vector<std::vector<std::string>> rows = {{"NAME", "RUN", "STATE", "STEP", "LOSS", "REASON"}};
  for (const v1::JobStatus& job : jobs.jobs()) {
    rows.push_back(
        {job.name(), job.run_id(), NameOf(job.state()), StepOf(job), LossOf(job), job.reason()});
  }
  return FormatTable(rows);
}

std::string FormatStatus(const v1::JobStatus& status) {
  std::vector<std::vector<std::string>> rows = {
      {"job", absl::StrCat(status.name(), " (", status.run_id(), ")")},
      {"state",
       absl::StrCat(NameOf(status.state()), status.reason().empty() ? "" : ": ", status.reason())},
      {"step", StepOf(status)},
  };
  if (status.has_first() && status.has_last()) {
    rows.push_back({"loss", absl::StrFormat("%.4f at step %d, %.4f at step %d",
                                            status.first().loss(), status.first().step(),
                                            status.last().loss(), status.last().step())});
  }
  if (status.last().has_loss_scale()) {
    rows.push_back({"loss scale", absl::StrFormat("%g at step %d%s", status.last().loss_scale(),
                                                  status.last().step(),
                                                  status.last().skipped() ? ", skipped" : "")});
  }
  if (status.last().has_eval_loss()) {
    rows.push_back({"eval loss", absl::StrFormat("%.4f at step %d", status.last().eval_loss(),
                                                 status.last().step())});
  }
  if (status.has_resume()) {
    rows.push_back({"went on from",
                    absl::StrCat(status.resume().checkpoint(),
                                 status.resume().weights_only() ? " (its weights alone)" : "")});
  }
  if (status.has_checkpoint()) rows.push_back({"checkpoint", status.checkpoint().path()});
  if (status.has_store_plan()) {
    rows.push_back({"in stores", FormatStorePlan(status.store_plan())});
    rows.push_back({"version", absl::StrCat("step ", status.version().step(), " of epoch ",
                                            status.version().epoch())});
    rows.push_back({"steps lost", absl::StrCat(status.steps_lost())});
  }
  rows.push_back({"workers", absl::StrCat(status.workers(), ", ZeRO stage ", status.stage(),
                                          ", generation ", status.generation())});
  if (IsMesh(status.mesh())) {
    rows.push_back(
        {"mesh", absl::StrCat(DescribeMesh(status.mesh()), status.placement().empty() ? "" : "; ",
                              status.placement())});
  }
  rows.push_back({"submitted", WhenOf(status.submitted_unix_ms())});
  if (status.ended_unix_ms() != 0) rows.push_back({"ended", WhenOf(status.ended_unix_ms())});
  if (!status.weights_digest().empty()) rows.push_back({"weights", status.weights_digest()});
  if (!status.directory().empty()) rows.push_back({"directory", status.directory()});
  std::string text = FormatTable(rows);

  if (const std::string mesh = FormatMesh(status); !mesh.empty())
    absl::StrAppend(&text, "\n", mesh);
  if (!status.ranks().empty()) {
    rows = {{"RANK", "MEMBER", "HOST", "STEP", "PHASE", "HEARD"}};
    for (const v1::RankStatus& rank : status.ranks()) {
      rows.push_back({absl::StrCat(rank.rank()), rank.member(), rank.host(),
                      absl::StrCat(rank.progress().step()), rank.progress().phase(),
                      AgeOf(rank.heartbeat_age_ms())});
    }
    absl::StrAppend(&text, "\n", FormatTable(rows));
  }
  if (!status.stores().empty()) absl::StrAppend(&text, "\n", FormatStores(status));
  if (!status.plan().empty()) {
    std::map<uint32_t, v1::RankUsage> measured;
    for (const v1::RankStatus& rank : status.ranks()) {
      if (rank.has_usage()) measured[rank.rank()] = rank.usage();
    }
    absl::StrAppend(&text, "\n",
                    FormatShardPlans({status.plan().begin(), status.plan().end()}, measured));
  }
  if (!status.events().empty()) {
    rows = {{"WHEN", "STATE", "REASON"}};
    for (const v1::JobEvent& event : status.events()) {
      rows.push_back({WhenOf(event.unix_ms()), NameOf(event.state()), event.reason()});
    }
    absl::StrAppend(&text, "\n", FormatTable(rows));
  }
  return text;
}

std::string FormatNodes(const v1::NodesResponse& nodes) {
  if (nodes.nodes().empty()) {
    return "no members yet; start zeroshard-worker --coordinator HOST:PORT on each machine\n";
  }
  std::vector<std::vector<std::string>> rows = {{"NAME", "KIND", "STATE", "JOB", "HOST", "DEVICE",
                                                 "THREADS", "MEMORY", "RESERVED", "NVME", "CHUNKS",
                                                 "HELD", "METRICS", "HEARD"}};
  for (const v1::Node& node : nodes.nodes()) {
    const v1::Hello& hello = node.hello();
    const bool store = hello.kind() == v1::MEMBER_KIND_STORE;
    std::string job = node.job().empty() ? "-" : absl::StrCat(node.job(), " rank ", node.rank());
    if (store) job = absl::StrCat(node.jobs(), node.jobs() == 1 ? " job" : " jobs");
    rows.push_back({hello.name(), store ? "store" : "worker", node.state(), job, hello.host(),
                    hello.device().empty() ? "-" : hello.device(), absl::StrCat(hello.threads()),
                    FormatBytes(hello.memory_bytes()),
                    store ? FormatBytes(node.reserved_bytes()) : "-",
                    hello.nvme_bytes() == 0 ? "-"
                                            : absl::StrCat(FormatBytes(node.reserved_nvme_bytes()),
                                                           " of ", FormatBytes(hello.nvme_bytes())),
                    store ? absl::StrCat(node.chunks()) : "-", store ? HeldBy(node) : "-",
                    hello.metrics_address().empty() ? "-" : hello.metrics_address(),
                    AgeOf(node.heartbeat_age_ms())});
  }
  return FormatTable(rows);
}

std::string FormatStorePlan(const v1::StorePlan& plan) {
  std::string text = absl::StrCat(FormatBytes(plan.state_bytes()), " in ", plan.chunks(),
                                  plan.chunks() == 1 ? " chunk" : " chunks", ", and ",
                                  FormatBytes(plan.staging_bytes()), " for gradients");
  if (plan.replicas() > 1) absl::StrAppend(&text, ", ", plan.replicas(), " times");
  return text;
}

std::string FormatCheckpoints(const v1::CheckpointsResponse& checkpoints, absl::Time now) {
  if (checkpoints.checkpoints().empty()) {
    return absl::StrCat("no checkpoints yet in ", Shown(checkpoints.dir()), "\n");
  }
  std::vector<std::vector<std::string>> rows = {
      {"STEP", "AGE", "SIZE", "STATE", "LATEST", "PROBLEM"}};
  for (const v1::CheckpointEntry& entry : checkpoints.checkpoints()) {
    const absl::Duration age =
        std::max(now - absl::FromUnixMillis(entry.unix_ms()), absl::ZeroDuration());
    rows.push_back({absl::StrCat(entry.step()),
                    entry.unix_ms() == 0 ? "-" : FormatDuration(absl::ToDoubleSeconds(age)),
                    FormatBytes(entry.bytes()), entry.complete() ? "complete" : "incomplete",
                    entry.latest() ? "latest" : "-",
                    entry.problem().empty() ? "-" : entry.problem()});
  }
  return absl::StrCat("in ", Shown(checkpoints.dir()), "\n", FormatTable(rows));
}

std::string FormatBytes(uint64_t bytes) {
  const char* const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1000 && unit + 1 < std::size(units)) {
    value /= 1000;
    ++unit;
  }
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.3g %s", value, units[unit]);
}

}  // namespace zeroshard
