#include "common/plan/capacity.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/plan/activation_table.h"
#include "common/plan/mesh.h"
#include "common/plan/nvme_bytes.h"
#include "common/plan/pipeline_schedule.h"
#include "common/plan/step_time.h"

namespace zeroshard {
namespace {

constexpr int kAllReduce = 2, kSend = 4;
constexpr int kForward = 0, kBackward = 1;
constexpr int kMostStages = 64;
constexpr uint64_t kGradientBuffers = 3;  // as worker/zero/reduce has it

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

ZeroOptions OptionsOf(const Workload& w, const ModelTable& slice, const Configuration& c,
                      int64_t accumulation) {
  ZeroOptions o = w.options;
  o.stage = c.stage;
  o.world = c.data;
  o.micro_batches = w.micro_batches > 0 ? w.micro_batches : accumulation * c.data;
  o.checkpointing = c.checkpointing;
  o.offload_optimizer = c.offload != OffloadTo::kNone;
  o.offload_param = c.offload_param;
  if (!o.offload_optimizer) o.replicas = 1;
  if (w.fetch_one_ahead) {
    o.persistence_threshold = 0;
    o.max_reuse_distance = 0;
    o.prefetch_bucket = slice.units.size() > 2 ? slice.units[1].length : 0;
    o.max_live = std::numeric_limits<int64_t>::max() / 4;
  }
  return o;
}

// The blocks' kept activations of the other micro-batches that a pipeline's first stage has begun
// and not ended.
uint64_t InFlight(const ModelTable& slice, const ZeroOptions& o, int pipeline, int64_t rounds) {
  const auto others = static_cast<uint64_t>(
      AliveBound({.stages = pipeline, .micro_batches = rounds}, /*rank=*/0) - 1);
  if (others == 0) return 0;
  const ActivationTable block =
      MakeActivationTable(slice.config, UnitKind::kBlock, o.micro_batch, o.dtype, o.checkpointing);
  return Product(
      Product(static_cast<uint64_t>(block.kept_bytes), static_cast<uint64_t>(slice.config.layers)),
      others);
}

std::string WhyImpossible(const Workload& w, const Configuration& c, int64_t accumulation) {
  if (std::string problem = MeshProblem(w.model, c.tensor, c.pipeline); !problem.empty())
    return problem;
  if (w.micro_batches > 0 && c.data > w.micro_batches)
    return absl::StrCat(w.micro_batches, " micro-batches a step on ", c.data,
                        " data-parallel ranks");
  if (accumulation < c.pipeline)
    return absl::StrCat(accumulation, " micro-batches a rank in ", c.pipeline, " pipeline stages");
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
  return absl::StrJoin(parts, ", ");
}

uint64_t Footprint::Device() const {
  uint64_t sum = 0;
  for (const uint64_t kind : {parameters, gradients, optimizer, activations, buffers})
    sum = Sum(sum, kind);
  return sum;
}

uint64_t Evaluation::Moved() const {
  uint64_t sum = Sum(push, pull);
  for (const auto& row : traffic) {
    for (const uint64_t bytes : row) sum = Sum(sum, bytes);
  }
  return sum;
}

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

uint64_t TransientBytes(const ModelTable& model, const ZeroPolicy& policy) {
  const size_t n = policy.uses.size();
  const auto length = [&](size_t use) {
    return policy.layouts[static_cast<size_t>(policy.uses[use].unit)].length;
  };
  std::vector<bool> issued(n, false);
  int64_t live = 0, most = 0, table = 0;
  const auto issue = [&](size_t use) {
    issued[use] = true;
    live += length(use);
    most = std::max(most, live);
  };
  for (size_t i = 0; i < n; ++i) {
    if (policy.uses[i].gather && !issued[i]) issue(i);
    int64_t ahead = 0;
    for (size_t next = i + 1; next < n; ++next) {
      if (!policy.uses[next].gather) continue;
      ahead += length(next);
      if (ahead > policy.options.prefetch_bucket) break;
      if (issued[next]) continue;
      if (live + length(next) > policy.options.max_live) break;
      issue(next);
    }
    // A tied table is there until the head, whose use follows, is done with it.
    const bool tied_table = policy.uses[i].unit == 0 && i > 0;
    if (policy.uses[i].release) (tied_table ? table : live) += tied_table ? length(i) : -length(i);
    if (!tied_table) live -= std::exchange(table, 0);
  }
  const uint64_t wire = SizeOf(policy.options.dtype);
  uint64_t bytes = Product(static_cast<uint64_t>(most), wire);
  if (policy.gradient_mode == GradientMode::kFullWire) return bytes;
  int64_t widest = 0;
  for (size_t u = 1; u < model.units.size(); ++u) {
    if (model.units[u].kind == UnitKind::kBlock && policy.trained[u])
      widest = std::max(widest, model.units[u].length);
  }
  return Sum(bytes, Product(static_cast<uint64_t>(widest), wire * kGradientBuffers));
}

Evaluation Evaluate(const Workload& w, const ClusterSize& cluster, const Configuration& c) {
  Evaluation e;
  e.configuration = c;
  e.accumulation = w.micro_batches > 0 ? CeilDiv(w.micro_batches, c.data)
                                       : std::max<int64_t>(w.accumulation, c.pipeline);
  e.impossible = WhyImpossible(w, c, e.accumulation);
  if (!e.impossible.empty()) return e;
  const ModelTable slice = SliceModel(w.model, c.tensor, c.pipeline, c.checkpointing);
  const ZeroPolicy policy = MakeZeroPolicy(slice, OptionsOf(w, slice, c, e.accumulation));
  const ZeroOptions& o = policy.options;
  const RankPlan plan = PlanRank(slice, policy, 0);
  const int hosts = cluster.Hosts(c.Devices());
  const StoreBytes stores = BytesInStores(w, c, hosts);
  e.bytes.parameters = plan.parameters;
  e.bytes.gradients = plan.gradients;
  e.bytes.optimizer = plan.optimizer;
  e.bytes.activations = Sum(plan.activations, InFlight(slice, o, c.pipeline, policy.rounds));
  e.bytes.buffers = TransientBytes(slice, policy);
  e.bytes.host = stores.memory;
  e.bytes.nvme = stores.nvme;
  if (w.saves) {
    const int ranks = std::min(cluster.devices_per_host, c.Devices());
    e.bytes.host = Sum(
        e.bytes.host, Product(CheckpointCopyBytes(slice, policy, 0), static_cast<uint64_t>(ranks)));
  }
  e.push = plan.push;
  e.pull = plan.pull;
  e.traffic = plan.step;
  const MeshTraffic mesh = TrafficOfMesh(slice.config, c.tensor, c.pipeline, o.micro_batch,
                                         SizeOf(o.dtype), o.checkpointing);
  const auto rounds = static_cast<uint64_t>(policy.rounds);
  e.traffic[kAllReduce][kForward] += Product(mesh.all_reduce_forward, rounds);
  e.traffic[kAllReduce][kBackward] += Product(mesh.all_reduce_backward, rounds);
  e.traffic[kSend][kForward] += Product(mesh.send_forward, rounds);
  e.traffic[kSend][kBackward] += Product(mesh.send_backward, rounds);
  e.time = EstimateStep(w, cluster, slice.config, o, e);
  Judge(cluster, &e);
  return e;
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
  for (int devices = 1; devices <= cluster.devices;
       devices = devices == cluster.devices ? devices + 1
                                            : std::min(devices * 2, cluster.devices)) {
    std::optional<Evaluation> best;
    for (const Configuration& c : Configurations(cluster, devices, meshes)) {
      if (workload.model.config.layers % c.pipeline != 0) continue;
      Evaluation e = Evaluate(workload, cluster, c);
      if (e.Fits() && (!best || Smaller(e, *best))) best = std::move(e);
    }
    if (best) return best;
  }
  return std::nullopt;
}

}  // namespace zeroshard
