#include "common/plan/capacity.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/plan/nvme_bytes.h"
#include "common/plan/pipeline_schedule.h"
#include "common/plan/pipeline_time.h"
#include "common/plan/step_time.h"

namespace zeroshard {
namespace {

constexpr int kMostStages = 64;
// Times p: micro-batches of a pipeline's step that are counted one by one (pipeline_time.cc); the
// rest is taken to be like the last p of them.
constexpr int64_t kWhole = 4;

uint64_t Sum(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<uint64_t>::max() : sum;
}

uint64_t Product(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<uint64_t>::max() : product;
}

// What all stores together keep, and each host's part of it.
struct StoreBytes {
  uint64_t memory = 0, nvme = 0;
};

StoreBytes BytesInStores(const Workload& w, const Configuration& c, int hosts) {
  StoreBytes bytes;
  if (c.offload == OffloadTo::kNone) return bytes;
  uint64_t all = 0;
  for (const UnitTable& unit : w.model.units) {
    const bool trained = unit.AnyTrainable();
    const auto of = [&](int64_t elements) {
      const ChunkBytes chunk =
          BytesOf({.end = elements, .trained = trained}, w.options.dtype, w.momentum_only);
      return c.offload == OffloadTo::kNvme ? NvmeBytesOf(elements, chunk) : chunk.Total();
    };
    all =
        Sum(all, Product(of(kChunkElements), static_cast<uint64_t>(unit.length / kChunkElements)));
    all = Sum(all, of(unit.length % kChunkElements));
  }
  const auto h = static_cast<uint64_t>(hosts);
  const uint64_t each = Product(all, static_cast<uint64_t>(w.options.replicas)) / h;
  if (c.offload == OffloadTo::kCpu) {
    bytes.memory = each;
  } else {
    bytes.nvme = Sum(each, NvmeFixedBytes(kChunkElements));
    bytes.memory = NvmeMemoryBytes(kChunkElements);
  }
  return bytes;
}

ZeroOptions OptionsOf(const Workload& w, const ModelTable& part, const Configuration& c,
                      int64_t accumulation) {
  ZeroOptions o = w.options;
  o.stage = c.stage;
  o.full_gradients = c.full_gradients;
  o.world = c.data;
  o.micro_batches = w.micro_batches > 0 ? w.micro_batches : accumulation * c.data;
  o.checkpointing = c.checkpointing;
  o.offload_optimizer = c.offload != OffloadTo::kNone;
  o.offload_param = c.offload_param;
  if (!o.offload_optimizer) o.replicas = 1;
  if (w.fetch_one_ahead) {
    o.persistence_threshold = 0;
    o.max_reuse_distance = 0;
    o.prefetch_bucket = 0;
    for (const UnitTable& unit : part.units)
      if (unit.kind == UnitKind::kBlock)
        o.prefetch_bucket = std::max(o.prefetch_bucket, unit.length);
    o.max_live = std::numeric_limits<int64_t>::max() / 4;
  }
  return o;
}

int64_t Counted(int64_t stages, int64_t micro_batches) {
  if (micro_batches <= kWhole * stages) return micro_batches;
  return kWhole * stages - (stages - micro_batches % stages) % stages;
}

// `times` as much more as `after` is than `before`.
void Extend(const TrafficTable& after, const TrafficTable& before, uint64_t times,
            TrafficTable* sum) {
  for (size_t op = 0; op < sum->size(); ++op) {
    for (size_t phase = 0; phase < (*sum)[op].size(); ++phase)
      (*sum)[op][phase] =
          Sum((*sum)[op][phase], Product(after[op][phase] - before[op][phase], times));
  }
}

uint64_t MovedOf(const TrafficTable& traffic, uint64_t push, uint64_t pull) {
  uint64_t sum = Sum(push, pull);
  for (const auto& row : traffic) {
    for (const uint64_t bytes : row) sum = Sum(sum, bytes);
  }
  return sum;
}

std::string WhyImpossible(const Workload& w, const Configuration& c, int64_t accumulation) {
  if (std::string problem = MeshProblem(w.model, c.Cut()); !problem.empty()) return problem;
  if (w.micro_batches > 0 && c.data > w.micro_batches)
    return absl::StrCat(w.micro_batches, " micro-batches a step on ", c.data,
                        " data-parallel ranks");
  if (c.pipeline * c.virtual_stages > 1 &&
      accumulation > kMostScheduled / (int64_t{c.pipeline} * c.virtual_stages))
    return absl::StrCat(accumulation, " micro-batches a rank in ", c.pipeline, " x ",
                        c.virtual_stages, " pipeline stages, of which a schedule has at most ",
                        kMostScheduled, " together");
  if (c.offload != OffloadTo::kNone && ChunkCount(w.model) > kMaxChunks)
    return "more chunks than the shard stores keep track of";
  return "";
}

void Judge(const ClusterSize& cluster, Evaluation* e) {
  for (const Shortage& s : {Shortage{"device memory", e->bytes.Device(), cluster.device_memory},
                            Shortage{"host memory", e->bytes.host, cluster.host_memory},
                            Shortage{"NVMe", e->bytes.nvme, cluster.nvme}}) {
    if (s.wanted > s.there) e->lacks.push_back(s);
  }
}

}  // namespace

const char* NameOf(OffloadTo to) {
  switch (to) {
    case OffloadTo::kNone:
      return "none";
    case OffloadTo::kCpu:
      return "cpu";
    case OffloadTo::kNvme:
      return "nvme";
  }
  return "?";
}

std::string Describe(const Configuration& c) {
  std::vector<std::string> parts = {absl::StrCat("stage ", c.stage)};
  if (c.offload != OffloadTo::kNone) {
    parts.push_back(absl::StrCat(c.offload_param ? "optimizer and parameters" : "optimizer", " on ",
                                 NameOf(c.offload)));
  }
  if (c.checkpointing) parts.push_back("activation checkpointing");
  std::vector<std::string> mesh;
  if (c.tensor > 1) mesh.push_back(absl::StrCat("tensor ", c.tensor));
  if (c.pipeline > 1) mesh.push_back(absl::StrCat("pipeline ", c.pipeline));
  mesh.push_back(absl::StrCat("data ", c.data));
  parts.push_back(absl::StrJoin(mesh, " x "));
  if (c.virtual_stages > 1) parts.push_back(absl::StrCat(c.virtual_stages, " virtual stages"));
  if (c.sequence_parallel) parts.push_back("sequence parallel");
  if (c.full_gradients) parts.push_back("full pipeline gradients");
  return absl::StrJoin(parts, ", ");
}

uint64_t Footprint::Device() const {
  uint64_t sum = 0;
  for (const uint64_t kind : {parameters, gradients, optimizer, activations, buffers})
    sum = Sum(sum, kind);
  return sum;
}

uint64_t PositionPlan::Moved() const { return MovedOf(traffic, push, pull); }
uint64_t Evaluation::Moved() const { return MovedOf(traffic, push, pull); }

double ForwardOperations(const ModelConfig& c) {
  const double hidden = static_cast<double>(c.hidden);
  const double width = static_cast<double>(c.heads * c.head_dim);
  const double kv = static_cast<double>(c.kv_heads * c.head_dim);
  const double mlp =
      static_cast<double>(c.intermediate) * (c.architecture == Architecture::kGpt2 ? 2 : 3);
  const double block = hidden * (2 * width + 2 * kv + mlp);
  const double attention = static_cast<double>(c.sequence) * width;  // two products of T/2
  return static_cast<double>(c.layers) * (2 * block + 2 * attention) +
         2 * static_cast<double>(c.vocab) * hidden;
}

const PlanEvaluator::Cut& PlanEvaluator::CutOf(const MeshCut& cut, bool checkpointing) {
  const auto key = std::make_tuple(cut.tensor, cut.pipeline, cut.virtual_stages,
                                   cut.sequence_parallel, checkpointing);
  const auto found = cuts_.find(key);
  if (found != cuts_.end()) return found->second;
  Cut made{.model = CutModel(&workload_.model, cut, checkpointing), .parts = {}, .slices = {}};
  for (const int position : made.model.Positions()) {
    made.parts.push_back(made.model.Part(position));
    made.slices.push_back(made.model.Slice(made.parts.back(), 0));
  }
  return cuts_.emplace(key, std::move(made)).first->second;
}

const std::vector<RankSchedule>& PlanEvaluator::Schedules(const PipelineShape& shape) {
  const auto key = std::make_tuple(shape.stages, shape.virtual_stages, shape.micro_batches);
  const auto found = schedules_.find(key);
  if (found != schedules_.end()) return found->second;
  return schedules_.emplace(key, *MakePipelineSchedule(shape)).first->second;
}

// Of the first rank of the stage's data line and tensor group. `policy`: what its engine does.
RankPlan PlanEvaluator::PlanStage(const Configuration& c, const Cut& cut, size_t position,
                                  const ZeroOptions& options, ZeroPolicy* policy) {
  const StageModel& stage = cut.parts[position];
  const TensorRank* const stored = c.tensor > 1 ? &cut.slices[position] : nullptr;
  const auto plan = [&](int64_t micro_batches, ZeroPolicy* made) {
    const RankSchedule& schedule =
        Schedules({.stages = c.pipeline,
                   .virtual_stages = c.virtual_stages,
                   .micro_batches = micro_batches})[static_cast<size_t>(stage.rank)];
    *made = MakeStagePolicy(stage, options, schedule);
    return PlanRank(stage, *made, schedule, 0, c.Devices(), cut.model.Share(0), stored);
  };
  const int64_t rounds = RoundsOf(options), counted = Counted(c.pipeline, rounds);
  RankPlan result = plan(counted, policy);
  if (counted == rounds) return result;
  ZeroPolicy shorter;
  const RankPlan before = plan(counted - c.pipeline, &shorter), after = result;
  const auto times = static_cast<uint64_t>((rounds - counted) / c.pipeline);
  Extend(after.step, before.step, times, &result.step);
  Extend(after.tensor, before.tensor, times, &result.tensor);
  result.pull = Sum(result.pull, Product(after.pull - before.pull, times));
  return result;
}

void PlanEvaluator::PlanPositions(const Configuration& c, const Cut& cut,
                                  const ZeroOptions& options, Evaluation* e) {
  const StoreBytes stores = BytesInStores(workload_, c, cluster_.Hosts(c.Devices()));
  const auto ranks = static_cast<uint64_t>(std::min(cluster_.devices_per_host, c.Devices()));
  for (size_t i = 0; i < cut.parts.size(); ++i) {
    const StageModel& stage = cut.parts[i];
    ZeroPolicy policy;
    RankPlan plan;
    if (c.Cut().IsWhole()) {
      policy = MakeZeroPolicy(workload_.model, options);
      plan = PlanRank(workload_.model, policy, 0);
    } else {
      plan = PlanStage(c, cut, i, options, &policy);
    }
    PositionPlan& position = e->positions.emplace_back();
    position.pipeline = stage.rank;
    position.bytes = {.parameters = plan.parameters,
                      .gradients = plan.gradients,
                      .optimizer = plan.optimizer,
                      .activations = plan.activations,
                      .buffers = TransientBytes(stage.model, policy),
                      .host = stores.memory,
                      .nvme = stores.nvme};
    if (workload_.saves)
      position.bytes.host =
          Sum(stores.memory, Product(CheckpointCopyBytes(stage.model, policy, 0), ranks));
    position.traffic = plan.step;
    position.tensor = plan.tensor;
    position.push = plan.push;
    position.pull = plan.pull;
  }
}

Evaluation PlanEvaluator::Evaluate(const Configuration& c) {
  const Workload& w = workload_;
  Evaluation e;
  e.configuration = c;
  e.accumulation = w.micro_batches > 0 ? CeilDiv(w.micro_batches, c.data)
                                       : std::max<int64_t>(w.accumulation, c.pipeline);
  e.impossible = WhyImpossible(w, c, e.accumulation);
  if (!e.impossible.empty()) return e;
  const Cut& cut = CutOf(c.Cut(), c.checkpointing);
  const ZeroOptions options = OptionsOf(w, cut.parts.front().model, c, e.accumulation);
  PlanPositions(c, cut, options, &e);
  const auto device = [](const PositionPlan& a, const PositionPlan& b) {
    return a.bytes.Device() < b.bytes.Device();
  };
  const auto fullest = std::max_element(e.positions.begin(), e.positions.end(), device);
  e.fullest = static_cast<int>(fullest - e.positions.begin());
  e.bytes = fullest->bytes;
  for (const PositionPlan& p : e.positions) e.bytes.host = std::max(e.bytes.host, p.bytes.host);
  const auto busiest = std::max_element(
      e.positions.begin(), e.positions.end(),
      [](const PositionPlan& a, const PositionPlan& b) { return a.Moved() < b.Moved(); });
  e.traffic = busiest->traffic;
  e.tensor = busiest->tensor;
  e.push = busiest->push;
  e.pull = busiest->pull;
  EstimateStep(w, cluster_, cut.model, options, &e);
  Judge(cluster_, &e);
  return e;
}

Evaluation Evaluate(const Workload& w, const ClusterSize& cluster, const Configuration& c) {
  return PlanEvaluator(&w, &cluster).Evaluate(c);
}

std::vector<Configuration> Configurations(const ClusterSize& cluster, int devices, bool meshes) {
  std::vector<Configuration> all;
  const auto add = [&](Configuration c) {
    for (c.checkpointing = false;; c.checkpointing = true) {
      for (c.stage = 0; c.stage <= 3; ++c.stage) {
        c.offload = OffloadTo::kNone;
        c.offload_param = false;
        all.push_back(c);
        if (c.stage == 0) continue;
        for (const OffloadTo to : {OffloadTo::kCpu, OffloadTo::kNvme}) {
          c.offload = to;
          c.offload_param = false;
          all.push_back(c);
          if (c.stage != 3) continue;
          c.offload_param = true;
          all.push_back(c);
        }
      }
      if (c.checkpointing) return;
    }
  };
  const int most_tensor = meshes ? std::min(devices, cluster.devices_per_host) : 1;
  const int most_pipeline = meshes ? std::min(devices, kMostStages) : 1;
  for (int pipeline = 1; pipeline <= most_pipeline; pipeline *= 2) {
    for (int tensor = 1; tensor <= most_tensor; tensor *= 2) {
      if (devices % (tensor * pipeline) != 0) continue;
      Configuration c;
      c.tensor = tensor;
      c.pipeline = pipeline;
      c.data = devices / (tensor * pipeline);
      add(c);
    }
  }
  return all;
}

bool Smaller(const Evaluation& a, const Evaluation& b) {
  const Configuration& x = a.configuration;
  const Configuration& y = b.configuration;
  if (x.Devices() != y.Devices()) return x.Devices() < y.Devices();
  if (x.IsMesh() != y.IsMesh()) return !x.IsMesh();
  const auto moved = [](const Evaluation& e) {
    const double bytes = static_cast<double>(e.Moved()) * e.configuration.Devices();
    return e.time.tokens > 0 ? bytes / e.time.tokens : bytes;
  };
  if (moved(a) != moved(b)) return moved(a) < moved(b);
  if (x.checkpointing != y.checkpointing) return !x.checkpointing;
  return x.stage < y.stage;
}

std::optional<Evaluation> SmallestThatFits(const Workload& workload, const ClusterSize& cluster,
                                           bool meshes) {
  PlanEvaluator evaluator(&workload, &cluster);
  for (int devices = 1; devices <= cluster.devices;
       devices = devices == cluster.devices ? devices + 1
                                            : std::min(devices * 2, cluster.devices)) {
    std::optional<Evaluation> best;
    for (const Configuration& c : Configurations(cluster, devices, meshes)) {
      if (workload.model.config.layers % c.pipeline != 0) continue;
      Evaluation e = evaluator.Evaluate(c);
      if (e.accumulation < c.pipeline) continue;
      if (e.Fits() && (!best || Smaller(e, *best))) best = std::move(e);
    }
    if (best) return best;
  }
  return std::nullopt;
}

}  // namespace zeroshard
