#include "client/plan_report.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/console.h"
#include "client/render.h"

namespace zeroshard {
namespace {

using Json = nlohmann::ordered_json;
using Row = std::vector<std::string>;

constexpr const char* kOps[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "send"};
constexpr const char* kPhases[] = {"forward", "backward", "step"};

std::string Size(uint64_t bytes) { return bytes == 0 ? "-" : FormatBytes(bytes); }

std::string Speed(double bytes) {
  return absl::StrCat(FormatBytes(static_cast<uint64_t>(bytes)), "/s");
}

std::string Seconds(double seconds) {
  if (seconds <= 0) return "-";
  if (seconds < 1) return absl::StrFormat("%.3g ms", seconds * 1e3);
  return absl::StrFormat("%.3g s", seconds);
}

uint64_t Phase(const Evaluation& e, size_t phase) {
  uint64_t sum = 0;
  for (const auto& row : e.traffic) sum += row[phase];
  return sum;
}

std::string Verdict(const Evaluation& e) {
  if (!e.impossible.empty()) return absl::StrCat("no: ", e.impossible);
  std::vector<std::string> lacks;
  for (const Shortage& s : e.lacks) {
    lacks.push_back(absl::StrCat(FormatBytes(s.wanted), " of ", s.kind, ", ",
                                 s.there == 0 ? "none" : FormatBytes(s.there), " there"));
  }
  return lacks.empty() ? "yes" : absl::StrCat("no: ", absl::StrJoin(lacks, "; "));
}

std::string OffloadName(const Configuration& c) {
  return absl::StrCat(NameOf(c.offload), c.offload_param ? "+params" : "");
}

const Row kHeader = {"STAGE",     "OFFLOAD",   "RECOMPUTE",   "MESH",     "PARAMETERS",
                     "GRADIENTS", "OPTIMIZER", "ACTIVATIONS", "BUFFERS",  "DEVICE",
                     "HOST",      "NVME",      "FORWARD",     "BACKWARD", "STEP",
                     "PUSH",      "PULL",      "TIME",        "FITS"};

Row RowOf(const Evaluation& e) {
  const Configuration& c = e.configuration;
  Row row = {absl::StrCat(c.stage), OffloadName(c), c.checkpointing ? "yes" : "no",
             absl::StrCat(c.tensor, "x", c.pipeline, "x", c.data)};
  if (!e.impossible.empty()) {
    row.resize(kHeader.size() - 1, "-");
  } else {
    for (const uint64_t bytes :
         {e.bytes.parameters, e.bytes.gradients, e.bytes.optimizer, e.bytes.activations,
          e.bytes.buffers, e.bytes.Device(), e.bytes.host, e.bytes.nvme, Phase(e, 0), Phase(e, 1),
          Phase(e, 2), e.push, e.pull}) {
      row.push_back(Size(bytes));
    }
    row.push_back(Seconds(e.time.total));
  }
  row.push_back(Verdict(e));
  return row;
}

std::string TableOf(const std::vector<Evaluation>& evaluations) {
  std::vector<Row> rows = {kHeader};
  for (const Evaluation& e : evaluations) rows.push_back(RowOf(e));
  return FormatTable(rows);
}

std::string PaperTable(double parameters) {
  std::vector<Row> rows = {{"RANKS", "STAGE 0", "STAGE 1", "STAGE 2", "STAGE 3"}};
  for (const int ranks : kPaperRanks) {
    Row& row = rows.emplace_back();
    row.push_back(absl::StrCat(ranks));
    for (int stage = 0; stage <= 3; ++stage) {
      row.push_back(absl::StrFormat("%.4g GB", ModelStateBytes(parameters, ranks, stage) * 1e-9));
    }
  }
  return FormatTable(rows);
}

std::string Details(const Evaluation& e) {
  const Configuration& c = e.configuration;
  std::string text =
      absl::StrCat(c.Devices(), c.Devices() == 1 ? " device: " : " devices: ", Describe(c), "\n");
  std::vector<Row> rows = {{"  TRAFFIC OF A RANK", "FORWARD", "BACKWARD", "STEP"}};
  for (size_t op = 0; op < e.traffic.size(); ++op) {
    const auto& bytes = e.traffic[op];
    if (bytes[0] + bytes[1] + bytes[2] == 0) continue;
    rows.push_back({absl::StrCat("  ", kOps[op]), Size(bytes[0]), Size(bytes[1]), Size(bytes[2])});
  }
  if (e.push + e.pull > 0) {
    rows.push_back(
        {"  stores", "-", "-",
         absl::StrCat(FormatBytes(e.push), " pushed, ", FormatBytes(e.pull), " pulled")});
  }
  if (rows.size() > 1) absl::StrAppend(&text, FormatTable(rows));
  const StepTime& t = e.time;
  absl::StrAppend(&text, "  a step of ", FormatCount(t.tokens), " tokens: about ", Seconds(t.total),
                  " (", FormatCount(t.TokensPerSecond()), " tokens/s): computing ",
                  Seconds(t.compute), ", moving meanwhile ", Seconds(t.hidden), ", moving alone ",
                  Seconds(t.exposed), ", the stores' update ", Seconds(t.update),
                  ", pipeline idle ", Seconds(t.bubble), "\n");
  if (c.IsMesh()) {
    absl::StrAppend(&text,
                    "  note: jobs train data-parallel so far; parallel.tensor and "
                    "parallel.pipeline above 1 are refused\n");
  }
  return text;
}

std::string Assumptions(const PlanReport& r) {
  const ClusterSize& c = r.cluster;
  const Workload& w = r.workload;
  std::string text = absl::StrFormat(
      "assumed: %g of a peak of %.4g operations/s is reached, and %g of every link: %s between the "
      "devices of a host, %s network a host, %s device to host, %s host memory, %s NVMe\n",
      c.peak_share, c.peak, c.link_share, Speed(c.device_link), Speed(c.network),
      Speed(c.host_link), Speed(c.memory_speed), Speed(c.nvme_speed));
  absl::StrAppend(&text, "assumed: ",
                  w.options.overlap
                      ? "what moves in forward and backward hides behind computing; "
                      : "nothing that moves hides behind computing (overlap_comm: false); ",
                  "the end of a step and tensor parallelism's all-reduces do not; ranks form "
                  "rings; the stores' "
                  "update touches 28 bytes a parameter; stores are spread over all hosts\n");
  absl::StrAppend(&text, "buffers are an upper bound, all else is what a rank allocates and sends",
                  w.fetch_one_ahead ? "; stage 3 with stage3_max_reuse_distance 0, "
                                      "stage3_param_persistence_threshold 0 and a "
                                      "prefetch bucket of one block\n"
                                    : ", with the job's own buckets and thresholds\n");
  return text;
}

// Of what does not fit, what misses the least.
const Evaluation* Nearest(const std::vector<Evaluation>& evaluations) {
  const auto miss = [](const Evaluation& e) {
    double worst = 0;
    for (const Shortage& s : e.lacks) {
      worst = std::max(
          worst, s.there == 0 ? 1e9 : static_cast<double>(s.wanted) / static_cast<double>(s.there));
    }
    return worst;
  };
  const Evaluation* best = nullptr;
  for (const Evaluation& e : evaluations) {
    if (e.impossible.empty() && (best == nullptr || miss(e) < miss(*best))) best = &e;
  }
  return best;
}

std::string Conclusion(const PlanReport& r) {
  if (r.smallest) return absl::StrCat("the smallest that fits: ", Details(*r.smallest));
  std::string text = absl::StrCat("nothing fits on ", r.cluster.devices,
                                  r.cluster.devices == 1 ? " device" : " devices");
  if (const Evaluation* e = Nearest(r.data_parallel)) {
    absl::StrAppend(&text, "; nearest comes ", Describe(e->configuration), ", which wants ",
                    absl::StripPrefix(Verdict(*e), "no: "));
  }
  return absl::StrCat(text, "\n");
}

std::string ClusterLine(const ClusterSize& c) {
  return absl::StrCat("cluster: ", c.devices, c.devices == 1 ? " device of " : " devices of ",
                      Size(c.device_memory), ", ", c.devices_per_host, " a host; for shard stores ",
                      c.host_memory == 0 ? "no host memory" : FormatBytes(c.host_memory), " and ",
                      c.nvme == 0 ? "no NVMe" : absl::StrCat(FormatBytes(c.nvme), " of NVMe"),
                      " a host\n");
}

Json JsonOf(const Evaluation& e) {
  const Configuration& c = e.configuration;
  Json json = {{"devices", c.Devices()},
               {"stage", c.stage},
               {"offload_optimizer", NameOf(c.offload)},
               {"offload_param", c.offload_param ? NameOf(c.offload) : "none"},
               {"activation_checkpointing", c.checkpointing},
               {"tensor", c.tensor},
               {"pipeline", c.pipeline},
               {"data", c.data},
               {"fits", e.Fits()}};
  if (!e.impossible.empty()) {
    json["impossible"] = e.impossible;
    return json;
  }
  json["micro_batches_per_rank"] = e.accumulation;
  json["memory_bytes"] = {{"parameters", e.bytes.parameters},
                          {"gradients", e.bytes.gradients},
                          {"optimizer", e.bytes.optimizer},
                          {"activations", e.bytes.activations},
                          {"buffers", e.bytes.buffers},
                          {"device", e.bytes.Device()},
                          {"host", e.bytes.host},
                          {"nvme", e.bytes.nvme}};
  Json traffic = Json::object();
  for (size_t op = 0; op < e.traffic.size(); ++op) {
    for (size_t phase = 0; phase < e.traffic[op].size(); ++phase) {
      traffic[kOps[op]][kPhases[phase]] = e.traffic[op][phase];
    }
  }
  json["traffic_bytes_per_step"] = std::move(traffic);
  json["push_bytes_per_step"] = e.push;
  json["pull_bytes_per_step"] = e.pull;
  json["step_seconds"] = {{"compute", e.time.compute}, {"overlapped", e.time.hidden},
                          {"exposed", e.time.exposed}, {"update", e.time.update},
                          {"bubble", e.time.bubble},   {"total", e.time.total}};
  json["tokens_per_step"] = e.time.tokens;
  json["lacks"] = Json::array();
  for (const Shortage& s : e.lacks) {
    json["lacks"].push_back({{"kind", s.kind}, {"wanted_bytes", s.wanted}, {"bytes", s.there}});
  }
  return json;
}

}  // namespace

void FillReport(bool meshes, PlanReport* report) {
  const ClusterSize& cluster = report->cluster;
  std::map<std::pair<int, int>, Evaluation> best;
  for (const Configuration& c : Configurations(cluster, cluster.devices, meshes)) {
    Evaluation e = Evaluate(report->workload, cluster, c);
    if (!c.IsMesh()) {
      report->data_parallel.push_back(std::move(e));
    } else if (e.Fits()) {
      const auto [it, added] = best.try_emplace({c.tensor, c.pipeline}, e);
      if (!added && Smaller(e, it->second)) it->second = std::move(e);
    }
  }
  for (auto& [mesh, e] : best) report->meshes.push_back(std::move(e));
  report->smallest = SmallestThatFits(report->workload, cluster, meshes);
}

std::string FormatReport(const PlanReport& r) {
  std::string text = absl::StrCat(r.model, "\n", ClusterLine(r.cluster));
  if (r.asked_parameters > 0) {
    absl::StrAppend(&text, "\nmodel state of a rank by ZeRO's formula, 16 bytes a parameter:\n",
                    PaperTable(r.asked_parameters));
  }
  if (r.job) {
    absl::StrAppend(&text, "\nthis job, rank by rank (bytes of its state and of a step):\n",
                    FormatShardPlans(r.ranks, {}),
                    "as it is written it fits such devices: ", Verdict(*r.job), "\n");
  }
  absl::StrAppend(&text, "\non ", r.cluster.devices,
                  r.cluster.devices == 1 ? " device" : " devices",
                  ", of the rank that has most (MESH: tensor x pipeline x data; FORWARD to PULL: "
                  "bytes it sends in a step; HOST and NVME: of each host):\n",
                  TableOf(r.data_parallel));
  if (!r.meshes.empty()) {
    absl::StrAppend(&text,
                    "\nwith tensor and pipeline parallelism, the smallest that fits of each mesh "
                    "(planned only: jobs train data-parallel so far):\n",
                    TableOf(r.meshes));
  }
  absl::StrAppend(&text, "\n", Conclusion(r), Assumptions(r));
  return text;
}

Json ToJson(const PlanReport& r) {
  const ClusterSize& c = r.cluster;
  const ModelConfig& m = r.workload.model.config;
  Json json = {{"model",
                {{"parameters", r.workload.model.ParameterCount()},
                 {"hidden_size", m.hidden},
                 {"layers", m.layers},
                 {"heads", m.heads},
                 {"sequence_length", m.sequence},
                 {"vocab_size", m.vocab}}},
               {"cluster",
                {{"devices", c.devices},
                 {"devices_per_host", c.devices_per_host},
                 {"device_memory_bytes", c.device_memory},
                 {"host_memory_bytes", c.host_memory},
                 {"nvme_bytes", c.nvme}}},
               {"assumptions",
                {{"peak_operations_per_second", c.peak},
                 {"peak_share", c.peak_share},
                 {"link_share", c.link_share},
                 {"device_link_bytes_per_second", c.device_link},
                 {"network_bytes_per_second", c.network},
                 {"host_link_bytes_per_second", c.host_link},
                 {"host_memory_bytes_per_second", c.memory_speed},
                 {"nvme_bytes_per_second", c.nvme_speed},
                 {"overlap", r.workload.options.overlap}}}};
  if (r.asked_parameters > 0) {
    Json table = Json::array();
    for (const int ranks : kPaperRanks) {
      Json row = {{"ranks", ranks}, {"bytes_by_stage", Json::array()}};
      for (int stage = 0; stage <= 3; ++stage)
        row["bytes_by_stage"].push_back(ModelStateBytes(r.asked_parameters, ranks, stage));
      table.push_back(std::move(row));
    }
    json["zero_table"] = std::move(table);
  }
  if (r.job) {
    json["job"] = JsonOf(*r.job);
    json["ranks"] = Json::array();
    for (const v1::ShardPlan& rank : r.ranks) json["ranks"].push_back(ToJson(rank));
  }
  json["configurations"] = Json::array();
  for (const auto* list : {&r.data_parallel, &r.meshes}) {
    for (const Evaluation& e : *list) json["configurations"].push_back(JsonOf(e));
  }
  json["smallest"] = r.smallest ? JsonOf(*r.smallest) : Json(nullptr);
  return json;
}

}  // namespace zeroshard
