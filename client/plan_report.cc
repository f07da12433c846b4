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
// Of a search, in text: JSON has all.
constexpr size_t kMostShown = 20;

std::string Size(uint64_t bytes) { return bytes == 0 ? "-" : FormatBytes(bytes); }

std::string Speed(double bytes) {
  return absl::StrCat(FormatBytes(static_cast<uint64_t>(bytes)), "/s");
}

std::string Seconds(double seconds) {
  if (seconds <= 0) return "-";
  if (seconds < 1) return absl::StrFormat("%.3g ms", seconds * 1e3);
  return absl::StrFormat("%.3g s", seconds);
}

uint64_t Phase(const TrafficTable& traffic, size_t phase) {
  uint64_t sum = 0;
  for (const auto& row : traffic) sum += row[phase];
  return sum;
}

std::string Percent(double share) { return absl::StrFormat("%.3g %%", 100 * share); }

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

std::string MeshName(int tensor, int pipeline, int data) {
  return absl::StrCat(tensor, "x", pipeline, "x", data);
}

std::string MeshName(const Configuration& c) { return MeshName(c.tensor, c.pipeline, c.data); }

const Row kHeader = {"STAGE",     "OFFLOAD",   "RECOMPUTE",   "MESH",     "PARAMETERS",
                     "GRADIENTS", "OPTIMIZER", "ACTIVATIONS", "BUFFERS",  "DEVICE",
                     "HOST",      "NVME",      "FORWARD",     "BACKWARD", "STEP",
                     "PUSH",      "PULL",      "TIME",        "FITS"};

Row RowOf(const Evaluation& e) {
  const Configuration& c = e.configuration;
  Row row = {absl::StrCat(c.stage), OffloadName(c), c.checkpointing ? "yes" : "no", MeshName(c)};
  if (!e.impossible.empty()) {
    row.resize(kHeader.size() - 1, "-");
  } else {
    for (const uint64_t bytes :
         {e.bytes.parameters, e.bytes.gradients, e.bytes.optimizer, e.bytes.activations,
          e.bytes.buffers, e.bytes.Device(), e.bytes.host, e.bytes.nvme, Phase(e.traffic, 0),
          Phase(e.traffic, 1), Phase(e.traffic, 2), e.push, e.pull}) {
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

// What the ranks hold and send, by their place in the pipeline; tensor and data ranks of one place
// hold the same.
std::string PositionTable(const Evaluation& e) {
  std::vector<Row> rows = {{"  RANKS OF", "PARAMETERS", "GRADIENTS", "OPTIMIZER", "ACTIVATIONS",
                            "BUFFERS", "DEVICE", "FORWARD", "BACKWARD", "STEP", "TO TENSOR RANKS"}};
  for (const PositionPlan& p : e.positions) {
    Row& row = rows.emplace_back();
    row.push_back(absl::StrCat("  ", PositionName(p.pipeline, e.configuration.pipeline)));
    const Footprint& b = p.bytes;
    for (const uint64_t bytes :
         {b.parameters, b.gradients, b.optimizer, b.activations, b.buffers, b.Device(),
          Phase(p.traffic, 0), Phase(p.traffic, 1), Phase(p.traffic, 2),
          Phase(p.tensor, 0) + Phase(p.tensor, 1) + Phase(p.tensor, 2)}) {
      row.push_back(Size(bytes));
    }
  }
  return FormatTable(rows);
}

// Of a pipeline at stage 2 or 3.
std::string GradientCosts(const std::vector<Evaluation>& ways) {
  std::string text;
  for (const Evaluation& e : ways) {
    absl::StrAppend(
        &text, "  pipeline_gradients ",
        e.configuration.full_gradients ? "full: " : "sharded: ", FormatBytes(e.bytes.gradients),
        " of gradients and ", Size(e.bytes.buffers), " of buffers, ",
        Size(e.traffic[traffic::kReduceScatter][traffic::kBackward]), " reduced in backward and ",
        Size(e.traffic[traffic::kReduceScatter][traffic::kStep]), " at the end of a step, about ",
        Seconds(e.time.total), " a step\n");
  }
  return text;
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
  if (c.IsMesh()) absl::StrAppend(&text, PositionTable(e));
  const StepTime& t = e.time;
  absl::StrAppend(&text, "  a step of ", FormatCount(t.tokens), " tokens: about ", Seconds(t.total),
                  " (", FormatCount(t.TokensPerSecond()), " tokens/s): computing ",
                  Seconds(t.compute), ", moving meanwhile ", Seconds(t.hidden), ", moving alone ",
                  Seconds(t.exposed), ", between tensor ranks ", Seconds(t.tensor),
                  ", the stores' update ", Seconds(t.update), ", pipeline idle ", Seconds(t.bubble),
                  "\n");
  if (c.pipeline > 1)
    absl::StrAppend(&text, "  the pipeline's bubble: ", Percent(e.counted_bubble),
                    " of all ranks' time by the schedule and the stages' costs; ",
                    Percent(e.predicted_bubble), " = (p-1)/(v m + p-1) if they cost the same\n");
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
                  "the end of a step and what tensor ranks exchange do not; ranks form rings; a "
                  "pipeline's stages take as long as their units' operations; the stores' update "
                  "touches 28 bytes a parameter; stores are spread over all hosts\n");
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

std::string WayOf(const Configuration& c) {
  std::vector<std::string> parts;
  if (c.offload != OffloadTo::kNone) parts.push_back(absl::StrCat("offload ", OffloadName(c)));
  if (c.checkpointing) parts.push_back("recompute");
  if (c.sequence_parallel) parts.push_back("sequence parallel");
  if (c.virtual_stages > 1) parts.push_back(absl::StrCat(c.virtual_stages, " virtual stages"));
  if (c.full_gradients) parts.push_back("full gradients");
  return parts.empty() ? "-" : absl::StrJoin(parts, ", ");
}

std::string SearchTable(const MeshSearch& search) {
  std::vector<Row> rows = {
      {"", "MESH", "STAGE", "WITH", "DEVICE", "HOST", "NVME", "TIME", "TOKENS/S", "WHY"}};
  for (size_t i = 0; i < std::min(kMostShown, search.fits.size()); ++i) {
    const Evaluation& e = search.fits[i];
    rows.push_back({absl::StrCat(i + 1, "."), MeshName(e.configuration),
                    absl::StrCat(e.configuration.stage), WayOf(e.configuration),
                    Size(e.bytes.Device()), Size(e.bytes.host), Size(e.bytes.nvme),
                    Seconds(e.time.total), FormatCount(e.time.TokensPerSecond()), ReasonOf(e)});
  }
  return FormatTable(rows);
}

// One line a mesh.
std::string MisfitTable(const std::vector<Misfit>& misfits) {
  std::vector<Row> rows = {{"MESH", "STAGES", "WHY NOT"}};
  for (const Misfit& m : misfits) {
    const std::string mesh = MeshName(m.tensor, m.pipeline, m.data);
    if (!m.impossible.empty()) {
      rows.push_back({mesh, "all", m.impossible});
      continue;
    }
    std::vector<std::string> stages;
    const Evaluation* nearest = nullptr;
    for (const Evaluation& e : m.nearest) {
      stages.push_back(absl::StrCat(e.configuration.stage));
      if (nearest == nullptr || e.bytes.Device() < nearest->bytes.Device()) nearest = &e;
    }
    rows.push_back({mesh, absl::StrJoin(stages, ","),
                    absl::StrCat("nearest: ", Describe(nearest->configuration), ", which wants ",
                                 absl::StripPrefix(Verdict(*nearest), "no: "))});
  }
  return FormatTable(rows);
}

std::string SearchText(const PlanReport& r) {
  const MeshSearch& search = *r.search;
  const std::string on =
      absl::StrCat(r.cluster.devices, r.cluster.devices == 1 ? " device" : " devices");
  std::string text;
  if (search.fits.empty()) {
    absl::StrAppend(&text, "\nnothing fits on ", on, " of ", search.tried, " ways\n");
  } else {
    absl::StrAppend(&text, "\nmeshes and stages that fit on ", on,
                    ", best first by predicted tokens a second, each in its best way (MESH: tensor "
                    "x pipeline x data; DEVICE: of the rank that has most; HOST, NVME: of each "
                    "host):\n",
                    SearchTable(search));
    if (search.fits.size() > kMostShown)
      absl::StrAppend(&text, "and ", search.fits.size() - kMostShown,
                      " more; --output json has all\n");
  }
  if (!search.misfits.empty())
    absl::StrAppend(&text, "\nwhat does not fit:\n", MisfitTable(search.misfits));
  const ClusterSize& cluster = r.cluster;
  if (cluster.devices > std::min(cluster.devices_per_host, kMostSearchedStages)) {
    absl::StrAppend(&text, "\nnot looked at: tensor above the ", cluster.devices_per_host,
                    " devices of a host, pipeline above ", kMostSearchedStages, "\n");
  }
  if (!search.fits.empty()) absl::StrAppend(&text, "\nthe best: ", Details(search.fits.front()));
  return text;
}

Json TrafficJson(const TrafficTable& table) {
  Json json = Json::object();
  for (size_t op = 0; op < table.size(); ++op) {
    for (size_t phase = 0; phase < table[op].size(); ++phase)
      json[kOps[op]][kPhases[phase]] = table[op][phase];
  }
  return json;
}

Json MemoryJson(const Footprint& bytes) {
  return {{"parameters", bytes.parameters},
          {"gradients", bytes.gradients},
          {"optimizer", bytes.optimizer},
          {"activations", bytes.activations},
          {"buffers", bytes.buffers},
          {"device", bytes.Device()},
          {"host", bytes.host},
          {"nvme", bytes.nvme}};
}

Json PositionsJson(const Evaluation& e) {
  Json json = Json::array();
  for (const PositionPlan& p : e.positions) {
    json.push_back({{"pipeline", p.pipeline},
                    {"name", PositionName(p.pipeline, e.configuration.pipeline)},
                    {"memory_bytes", MemoryJson(p.bytes)},
                    {"traffic_bytes_per_step", TrafficJson(p.traffic)},
                    {"tensor_bytes_per_step", TrafficJson(p.tensor)},
                    {"push_bytes_per_step", p.push},
                    {"pull_bytes_per_step", p.pull}});
  }
  return json;
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
               {"virtual_stages", c.virtual_stages},
               {"sequence_parallel", c.sequence_parallel},
               {"pipeline_gradients", c.full_gradients ? "full" : "sharded"},
               {"fits", e.Fits()}};
  if (!e.impossible.empty()) {
    json["impossible"] = e.impossible;
    return json;
  }
  json["micro_batches_per_rank"] = e.accumulation;
  json["memory_bytes"] = MemoryJson(e.bytes);
  json["traffic_bytes_per_step"] = TrafficJson(e.traffic);
  json["push_bytes_per_step"] = e.push;
  json["pull_bytes_per_step"] = e.pull;
  if (c.IsMesh()) json["positions"] = PositionsJson(e);
  json["bubble_share"] = {{"predicted", e.predicted_bubble}, {"counted", e.counted_bubble}};
  json["step_seconds"] = {{"compute", e.time.compute}, {"overlapped", e.time.hidden},
                          {"exposed", e.time.exposed}, {"tensor", e.time.tensor},
                          {"update", e.time.update},   {"bubble", e.time.bubble},
                          {"total", e.time.total}};
  json["tokens_per_step"] = e.time.tokens;
  json["lacks"] = Json::array();
  for (const Shortage& s : e.lacks) {
    json["lacks"].push_back({{"kind", s.kind}, {"wanted_bytes", s.wanted}, {"bytes", s.there}});
  }
  return json;
}

Json SearchJson(const MeshSearch& search) {
  Json json = {{"tried", search.tried}, {"fits", Json::array()}, {"misfits", Json::array()}};
  for (const Evaluation& e : search.fits) {
    Json& fit = json["fits"].emplace_back(JsonOf(e));
    fit["tokens_per_second"] = e.time.TokensPerSecond();
    fit["limited_by"] = NameOf(LimitOf(e.time));
    fit["reason"] = ReasonOf(e);
  }
  for (const Misfit& m : search.misfits) {
    Json misfit = {{"tensor", m.tensor}, {"pipeline", m.pipeline}, {"data", m.data}};
    if (!m.impossible.empty()) misfit["impossible"] = m.impossible;
    misfit["nearest"] = Json::array();
    for (const Evaluation& e : m.nearest) misfit["nearest"].push_back(JsonOf(e));
    json["misfits"].push_back(std::move(misfit));
  }
  return json;
}

// Both ways to keep a pipeline's gradients, where there are two.
std::vector<Evaluation> GradientWays(const PlanReport& r, const Evaluation& of) {
  Configuration c = of.configuration;
  std::vector<Evaluation> ways;
  if (!of.impossible.empty() || c.pipeline == 1 || c.stage < 2) return ways;
  for (const bool full : {false, true}) {
    c.full_gradients = full;
    ways.push_back(Evaluate(r.workload, r.cluster, c));
  }
  return ways;
}

}  // namespace

bool PlanReport::Fits() const {
  if (job && job->Fits()) return true;
  return search ? !search->fits.empty() : smallest.has_value();
}

void FillSearch(PlanReport* report) {
  report->search = SearchMeshes(report->workload, report->cluster);
  if (report->job) {
    report->gradients = GradientWays(*report, *report->job);
  } else if (!report->search->fits.empty()) {
    report->gradients = GradientWays(*report, report->search->fits.front());
  }
}

void FillReport(bool meshes, PlanReport* report) {
  const ClusterSize& cluster = report->cluster;
  std::map<std::pair<int, int>, Evaluation> best;
  PlanEvaluator evaluator(&report->workload, &cluster);
  for (const Configuration& c : Configurations(cluster, cluster.devices, meshes)) {
    Evaluation e = evaluator.Evaluate(c);
    if (!c.IsMesh()) {
      report->data_parallel.push_back(std::move(e));
    } else if (e.Fits()) {
      const auto [it, added] = best.try_emplace({c.tensor, c.pipeline}, e);
      if (!added && Smaller(e, it->second)) it->second = std::move(e);
    }
  }
  for (auto& [mesh, e] : best) report->meshes.push_back(std::move(e));
  report->smallest = SmallestThatFits(report->workload, cluster, meshes);
  if (report->job) report->gradients = GradientWays(*report, *report->job);
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
    if (r.job->configuration.IsMesh() && r.job->impossible.empty())
      absl::StrAppend(&text, "as it is written, ", Details(*r.job), GradientCosts(r.gradients));
  }
  if (r.search) {
    absl::StrAppend(&text, SearchText(r), r.job ? "" : GradientCosts(r.gradients), Assumptions(r));
    return text;
  }
  absl::StrAppend(&text, "\non ", r.cluster.devices,
                  r.cluster.devices == 1 ? " device" : " devices",
                  ", of the rank that has most (MESH: tensor x pipeline x data; FORWARD to PULL: "
                  "bytes that one sends in a step, of those that send most; HOST and NVME: of each "
                  "host):\n",
                  TableOf(r.data_parallel));
  if (!r.meshes.empty()) {
    absl::StrAppend(&text,
                    "\nwith tensor and pipeline parallelism, the smallest that fits of each mesh "
                    "(--search compares them by time):\n",
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
  if (!r.gradients.empty()) {
    json["pipeline_gradients"] = {{"sharded", JsonOf(r.gradients[0])},
                                  {"full", JsonOf(r.gradients[1])}};
  }
  if (r.search) {
    json["search"] = SearchJson(*r.search);
    return json;
  }
  json["configurations"] = Json::array();
  for (const auto* list : {&r.data_parallel, &r.meshes}) {
    for (const Evaluation& e : *list) json["configurations"].push_back(JsonOf(e));
  }
  json["smallest"] = r.smallest ? JsonOf(*r.smallest) : Json(nullptr);
  return json;
}

}  // namespace zeroshard
