#include "coordinator/service/plan_metrics.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/plan/mesh.h"

namespace zeroshard::coordinator {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;

// The rows and columns of a TrafficTable, as workers name them.
constexpr std::array<const char*, 5> kOps = {"all_gather", "reduce_scatter", "all_reduce",
                                             "broadcast", "send"};
constexpr std::array<const char*, 3> kPhases = {"forward", "backward", "step"};
// What every schedule may use; of the others only what a plan has.
constexpr size_t kUsualOps = 2;

MetricFamily Gauge(const char* name, const char* help) {
  MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = prometheus::MetricType::Gauge;
  return family;
}

void Add(MetricFamily* family, absl::Span<const ClientMetric::Label> of_rank,
         std::vector<ClientMetric::Label> labels, uint64_t value) {
  ClientMetric& metric = family->metric.emplace_back();
  metric.label.assign(of_rank.begin(), of_rank.end());
  for (ClientMetric::Label& label : labels) metric.label.push_back(std::move(label));
  metric.gauge.value = static_cast<double>(value);
}

}  // namespace

void PlanMetrics::Show(const std::string& job, const v1::JobSpec& spec, uint32_t ranks) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto shown = jobs_.find(job);
    if (shown != jobs_.end() && shown->second.ranks.size() == ranks) return;
  }
  Plans plans;
  plans.stage = absl::StrCat(spec.zero_optimization().stage());
  const absl::StatusOr<ModelTable> model = MakeModelTable(spec.model());
  if (!model.ok()) return;  // then it was not submitted to this version
  absl::StatusOr<std::vector<RankPlan>> planned = PlanRanks(spec, *model, static_cast<int>(ranks));
  if (!planned.ok()) return;
  plans.ranks = *std::move(planned);
  std::lock_guard<std::mutex> lock(mutex_);
  jobs_.insert_or_assign(job, std::move(plans));
}

void PlanMetrics::Remove(const std::string& job) {
  std::lock_guard<std::mutex> lock(mutex_);
  jobs_.erase(job);
}

std::vector<MetricFamily> PlanMetrics::Collect() const {
  MetricFamily memory = Gauge("zeroshard_job_plan_memory_bytes",
                              "Device memory that a rank's plan holds, by kind, of a job that has "
                              "been placed and has not ended.");
  MetricFamily traffic = Gauge("zeroshard_job_plan_traffic_bytes",
                               "Bytes that a rank's plan sends to other ranks in one step, by "
                               "collective and phase.");
  MetricFamily offload = Gauge("zeroshard_job_plan_offload_bytes",
                               "Bytes that a rank's plan exchanges with shard stores in one step, "
                               "by direction.");
  std::lock_guard<std::mutex> lock(mutex_);
  if (jobs_.empty()) return {};
  for (const auto& [job, plans] : jobs_) {
    for (size_t rank = 0; rank < plans.ranks.size(); ++rank) {
      const RankPlan& plan = plans.ranks[rank];
      const ClientMetric::Label labels[] = {
          {"job", job}, {"rank", absl::StrCat(rank)}, {"stage", plans.stage}};
      Add(&memory, labels, {{"kind", "parameters"}}, plan.parameters);
      Add(&memory, labels, {{"kind", "gradients"}}, plan.gradients);
      Add(&memory, labels, {{"kind", "optimizer"}}, plan.optimizer);
      Add(&memory, labels, {{"kind", "activations"}}, plan.activations);
      for (size_t op = 0; op < kOps.size(); ++op) {
        for (size_t phase = 0; phase < kPhases.size(); ++phase) {
          const uint64_t bytes = plan.step[op][phase];
          if (op >= kUsualOps && bytes == 0) continue;
          Add(&traffic, labels, {{"op", kOps[op]}, {"phase", kPhases[phase]}}, bytes);
        }
      }
      Add(&offload, labels, {{"direction", "push"}}, plan.push);
      Add(&offload, labels, {{"direction", "pull"}}, plan.pull);
    }
  }
  std::vector<MetricFamily> families;
  families.push_back(std::move(memory));
  families.push_back(std::move(traffic));
  families.push_back(std::move(offload));
  return families;
}

}  // namespace zeroshard::coordinator
