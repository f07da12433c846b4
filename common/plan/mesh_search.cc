#include "common/plan/mesh_search.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace zeroshard {
namespace {

constexpr int kMostVirtual = 4;

bool Better(const Evaluation& a, const Evaluation& b) {
  const double x = a.time.TokensPerSecond(), y = b.time.TokensPerSecond();
  if (x != y) return x > y;
  if (a.bytes.Device() != b.bytes.Device()) return a.bytes.Device() < b.bytes.Device();
  return a.configuration.stage < b.configuration.stage;
}

// How many times too large the worst of what it lacks is.
double Miss(const Evaluation& e) {
  double worst = 0;
  for (const Shortage& s : e.lacks)
    worst = std::max(
        worst, s.there == 0 ? 1e9 : static_cast<double>(s.wanted) / static_cast<double>(s.there));
  return worst;
}

std::vector<std::pair<OffloadTo, bool>> Offloads(const ClusterSize& cluster, int stage) {
  std::vector<std::pair<OffloadTo, bool>> all = {{OffloadTo::kNone, false}};
  if (stage == 0) return all;
  for (const auto& [to, there] : {std::pair{OffloadTo::kCpu, cluster.host_memory},
                                  std::pair{OffloadTo::kNvme, cluster.nvme}}) {
    if (there == 0) continue;
    all.emplace_back(to, false);
    if (stage == 3) all.emplace_back(to, true);
  }
  return all;
}

// Every way to run a stage of ZeRO on the mesh of `mesh`.
std::vector<Configuration> Ways(const ClusterSize& cluster, const Configuration& mesh) {
  std::vector<Configuration> ways;
  Configuration c = mesh;
  const int most_virtual = mesh.pipeline > 1 ? kMostVirtual : 1;
  for (c.virtual_stages = 1; c.virtual_stages <= most_virtual; c.virtual_stages *= 2) {
    for (const bool rows : {false, true}) {
      if (rows && mesh.tensor == 1) continue;
      for (const bool full : {false, true}) {
        if (full && (mesh.pipeline == 1 || mesh.stage < 2)) continue;
        for (const bool checkpointing : {false, true}) {
          for (const auto& [to, parameters] : Offloads(cluster, mesh.stage)) {
            c.sequence_parallel = rows;
            c.full_gradients = full;
            c.checkpointing = checkpointing;
            c.offload = to;
            c.offload_param = parameters;
            ways.push_back(c);
          }
        }
      }
    }
  }
  return ways;
}

void SearchMesh(const ClusterSize& cluster, Configuration mesh, PlanEvaluator* evaluator,
                MeshSearch* search) {
  Misfit misfit;
  misfit.tensor = mesh.tensor;
  misfit.pipeline = mesh.pipeline;
  misfit.data = mesh.data;
  for (mesh.stage = 0; mesh.stage <= 3; ++mesh.stage) {
    std::optional<Evaluation> best, nearest;
    for (const Configuration& way : Ways(cluster, mesh)) {
      Evaluation e = evaluator->Evaluate(way);
      ++search->tried;
      if (!e.impossible.empty()) {
        // The plainest way says what no other way mends.
        if (misfit.impossible.empty()) misfit.impossible = e.impossible;
      } else if (!e.Fits()) {
        if (!nearest || Miss(e) < Miss(*nearest)) nearest = std::move(e);
      } else if (!best || Better(e, *best)) {
        best = std::move(e);
      }
    }
    if (best) {
      search->fits.push_back(*std::move(best));
    } else if (nearest) {
      misfit.nearest.push_back(*std::move(nearest));
    }
    if (best || nearest) misfit.impossible.clear();
  }
  if (!misfit.impossible.empty() || !misfit.nearest.empty())
    search->misfits.push_back(std::move(misfit));
}

std::string Percent(double share) { return absl::StrFormat("%.3g %%", 100 * share); }

}  // namespace

StepLimit LimitOf(const StepTime& t) {
  const std::pair<double, StepLimit> parts[] = {
      {std::min(t.compute, t.total), StepLimit::kComputing},
      {t.bubble, StepLimit::kBubble},
      {t.tensor, StepLimit::kTensor},
      {t.exposed + std::max(0.0, t.hidden - t.compute), StepLimit::kData},
      {t.update, StepLimit::kStores}};
  return std::max_element(std::begin(parts), std::end(parts),
                          [](const auto& a, const auto& b) { return a.first < b.first; })
      ->second;
}

const char* NameOf(StepLimit limit) {
  switch (limit) {
    case StepLimit::kComputing:
      return "computing";
    case StepLimit::kBubble:
      return "the pipeline's bubble";
    case StepLimit::kTensor:
      return "tensor traffic";
    case StepLimit::kData:
      return "traffic between data-parallel ranks and stages";
    case StepLimit::kStores:
      return "the stores' update";
  }
  return "?";
}

std::string ReasonOf(const Evaluation& e) {
  const StepTime& t = e.time;
  const std::string fullest =
      PositionName(e.positions[static_cast<size_t>(e.fullest)].pipeline, e.configuration.pipeline);
  std::vector<std::string> parts = {
      absl::StrFormat("%.3g GB on %s%s", static_cast<double>(e.bytes.Device()) * 1e-9,
                      e.configuration.pipeline == 1 ? "" : "a rank of ", fullest),
      absl::StrCat("computing ", Percent(t.compute / t.total), " of a step")};
  if (e.configuration.pipeline > 1)
    parts.push_back(absl::StrCat("bubble ", Percent(t.bubble / t.total), " (all ranks together ",
                                 Percent(e.counted_bubble), ", were stages equal ",
                                 Percent(e.predicted_bubble), "; ", e.accumulation,
                                 " micro-batches)"));
  if (t.tensor > 0) parts.push_back(absl::StrCat("tensor traffic ", Percent(t.tensor / t.total)));
  const double apart = t.exposed + std::max(0.0, t.hidden - t.compute);
  if (apart > 0) parts.push_back(absl::StrCat("other traffic ", Percent(apart / t.total)));
  if (t.update > 0) parts.push_back(absl::StrCat("stores ", Percent(t.update / t.total)));
  return absl::StrCat(absl::StrJoin(parts, ", "), "; limited by ", NameOf(LimitOf(t)));
}

MeshSearch SearchMeshes(const Workload& workload, const ClusterSize& cluster) {
  MeshSearch search;
  PlanEvaluator evaluator(&workload, &cluster);
  for (int pipeline = 1; pipeline <= std::min(cluster.devices, kMostSearchedStages); ++pipeline) {
    for (int tensor = 1; tensor <= std::min(cluster.devices, cluster.devices_per_host); ++tensor) {
      if (cluster.devices % (pipeline * tensor) != 0) continue;
      Configuration mesh;
      mesh.tensor = tensor;
      mesh.pipeline = pipeline;
      mesh.data = cluster.devices / (pipeline * tensor);
      SearchMesh(cluster, mesh, &evaluator, &search);
    }
  }
  std::stable_sort(search.fits.begin(), search.fits.end(), Better);
  return search;
}

}  // namespace zeroshard
