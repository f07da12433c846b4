#include "common/plan/pipeline_stages.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

using Square = unsigned __int128;

constexpr int64_t kMostCost = int64_t{1} << 62;
constexpr Square kNever = ~Square{0};

// How few runs of consecutive units cost at most `most` each.
int64_t RunsWithin(const std::vector<int64_t>& costs, int64_t most) {
  int64_t runs = 1, sum = 0;
  for (const int64_t cost : costs) {
    if (sum + cost > most) {
      ++runs;
      sum = 0;
    }
    sum += cost;
  }
  return runs;
}

// Any cut into fewer runs can be cut further without costing more, as there are units enough.
int64_t LeastLargest(const std::vector<int64_t>& costs, int64_t total, int runs) {
  int64_t low = *std::max_element(costs.begin(), costs.end()), high = total;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (RunsWithin(costs, middle) <= runs) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// By runs done: the most units that so many runs of at most `largest` can cover from the front.
std::vector<size_t> Furthest(const std::vector<int64_t>& costs, int64_t largest, int runs) {
  std::vector<size_t> covered = {0};
  for (int k = 0; k < runs; ++k) {
    size_t end = covered.back();
    for (int64_t sum = 0; end < costs.size() && sum + costs[end] <= largest; ++end)
      sum += costs[end];
    covered.push_back(end);
  }
  return covered;
}

// By dynamic programming from the end: least[k][i] is the least sum of squares of units i to n in
// the runs k to `runs`, each of at most `largest`; next[k][i] the end of the shortest first run
// that has it. Only where run k can begin: what is before and what is behind must fit the other
// runs.
std::vector<int> MostEven(const std::vector<int64_t>& costs, int64_t largest, int runs) {
  const size_t n = costs.size();
  const std::vector<size_t> before = Furthest(costs, largest, runs);
  const std::vector<size_t> behind = Furthest({costs.rbegin(), costs.rend()}, largest, runs);
  std::vector<Square> later(n + 1, kNever), least(n + 1, kNever);
  std::vector<std::vector<int>> next(static_cast<size_t>(runs), std::vector<int>(n + 1, 0));
  later[n] = 0;
  for (int k = runs - 1; k >= 0; --k) {
    std::fill(least.begin(), least.end(), kNever);
    const size_t first = n - behind[static_cast<size_t>(runs - k)];
    for (size_t i = first; i <= before[static_cast<size_t>(k)]; ++i) {
      int64_t sum = 0;
      for (size_t end = i + 1; end <= n; ++end) {
        sum += costs[end - 1];
        if (sum > largest) break;
        if (later[end] == kNever) continue;
        const Square squares = static_cast<Square>(sum) * static_cast<Square>(sum) + later[end];
        if (squares >= least[i]) continue;
        least[i] = squares;
        next[static_cast<size_t>(k)][i] = static_cast<int>(end);
      }
    }
    std::swap(least, later);
  }
  std::vector<int> begin = {0};
  for (const std::vector<int>& run : next) begin.push_back(run[static_cast<size_t>(begin.back())]);
  return begin;
}

}  // namespace

int PipelineStages::StageOf(int unit) const {
  return static_cast<int>(std::upper_bound(begin.begin(), begin.end(), unit) - begin.begin()) - 1;
}

absl::StatusOr<PipelineStages> CutStages(const std::vector<int64_t>& costs, int pipeline,
                                         int virtual_stages) {
  const int64_t runs = int64_t{pipeline} * virtual_stages;
  const auto units = static_cast<int64_t>(costs.size());
  if (pipeline < 1 || virtual_stages < 1 || runs > units) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parallel.pipeline x parallel.virtual_stages: seen ", pipeline, " x ", virtual_stages,
        " stages for ", units, " units (the embedding, each block, the head), wanted 1 to ", units,
        ": every stage has at least one; write smaller ones, or more model.layers"));
  }
  int64_t total = 0;
  for (size_t u = 0; u < costs.size(); ++u) {
    if (costs[u] < 0 || costs[u] >= kMostCost - total) {
      return absl::InvalidArgumentError(
          absl::StrCat("cost of unit ", u, ": seen ", costs[u],
                       ", wanted at least 0, and below 2^62 for all units together"));
    }
    total += costs[u];
  }
  PipelineStages stages;
  stages.pipeline = pipeline;
  stages.begin =
      MostEven(costs, LeastLargest(costs, total, static_cast<int>(runs)), static_cast<int>(runs));
  return stages;
}

std::vector<int64_t> UnitCosts(const ModelConfig& c, bool checkpointing) {
  const int64_t width = c.heads * c.head_dim;
  const int64_t kv = c.kv_heads * c.head_dim;
  const int64_t mlp = c.intermediate * (c.architecture == Architecture::kGpt2 ? 2 : 3);
  // Two a multiply-add; of attention two products over T / 2 positions.
  const int64_t block = 2 * c.hidden * (2 * width + 2 * kv + mlp) + 2 * c.sequence * width;
  const int64_t head = 2 * c.vocab * c.hidden;
  std::vector<int64_t> costs(static_cast<size_t>(c.layers) + 2, (checkpointing ? 4 : 3) * block);
  costs.front() = 2 * c.hidden;
  costs.back() = 3 * head;  // backward is twice the forward
  return costs;
}

std::vector<StageTime> StageTimes(const PipelineStages& stages, const ModelConfig& config,
                                  bool checkpointing) {
  const std::vector<int64_t> costs = UnitCosts(config, checkpointing);
  const std::vector<int64_t> once = UnitCosts(config, /*checkpointing=*/false);
  std::vector<StageTime> times;
  for (int k = 0; k < stages.Count(); ++k) {
    StageTime& time = times.emplace_back(StageTime{.forward = 0, .backward = 0});
    for (int unit = stages.Begin(k); unit < stages.End(k); ++unit) {
      const auto u = static_cast<size_t>(unit);
      const double forward = static_cast<double>(once[u]) / 3;
      time.forward += forward;
      time.backward += static_cast<double>(costs[u]) - forward;
    }
  }
  return times;
}

}  // namespace zeroshard
