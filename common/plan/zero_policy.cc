#include "common/plan/zero_policy.h"

#include <algorithm>

#include "common/plan/offload.h"

namespace zeroshard {

Rounding MakeRounding(const v1::JobSpec& spec) {
  Rounding rounding;
  rounding.stochastic = spec.bf16().enabled() && spec.bf16().stochastic_rounding();
  rounding.seed = spec.seed();
  return rounding;
}

DType ComputeType(const v1::JobSpec& spec) {
  if (spec.fp16().enabled()) return DType::kF16;
  return spec.bf16().enabled() ? DType::kBF16 : DType::kF32;
}

ZeroOptions MakeZeroOptions(const v1::JobSpec& spec, int world) {
  ZeroOptions o;
  const v1::ZeroSpec& zero = spec.zero_optimization();
  o.stage = static_cast<int>(zero.stage());
  o.world = world;
  o.micro_batch = static_cast<int64_t>(spec.train_micro_batch_size_per_gpu());
  o.micro_batches = static_cast<int64_t>(spec.train_batch_size()) / o.micro_batch;
  o.dtype = ComputeType(spec);
  o.rounding = MakeRounding(spec);
  o.deterministic = spec.deterministic();
  o.checkpointing = spec.activation_checkpointing();
  o.full_gradients = zero.pipeline_gradients() == "full";
  const auto bounded = [](uint64_t v) {
    return static_cast<int64_t>(std::min<uint64_t>(v, uint64_t{1} << 60));
  };
  if (zero.has_overlap_comm()) o.overlap = zero.overlap_comm();
  if (zero.has_reduce_bucket_size()) o.reduce_bucket = bounded(zero.reduce_bucket_size());
  if (zero.has_stage3_prefetch_bucket_size())
    o.prefetch_bucket = bounded(zero.stage3_prefetch_bucket_size());
  if (zero.has_stage3_param_persistence_threshold())
    o.persistence_threshold = bounded(zero.stage3_param_persistence_threshold());
  if (zero.has_stage3_max_live_parameters())
    o.max_live = bounded(zero.stage3_max_live_parameters());
  if (zero.has_stage3_max_reuse_distance())
    o.max_reuse_distance = bounded(zero.stage3_max_reuse_distance());
  o.offload_optimizer = IsOffloaded(spec);
  o.offload_param = OffloadsParameters(spec);
  if (o.offload_optimizer)
    o.replicas = static_cast<int>(std::max<uint32_t>(1, spec.store().replicas()));
  const v1::OffloadSpec& offload = zero.offload_optimizer();
  if (offload.has_buffer_count()) o.push_buffers = bounded(offload.buffer_count());
  if (offload.has_buffer_size()) o.push_buffer_size = bounded(offload.buffer_size());
  return o;
}

int64_t WidestUse(const ZeroPolicy& policy) {
  const auto length = [&policy](size_t u) {
    return policy.resident[u] ? 0 : policy.layouts[u].length;
  };
  int64_t widest = 0;
  for (size_t u = 0; u < policy.layouts.size(); ++u) widest = std::max(widest, length(u));
  // The head uses a tied table beside its own unit.
  return policy.tied ? std::max(widest, length(0) + length(policy.layouts.size() - 1)) : widest;
}

namespace {

// The order in which a micro-batch needs parameters. The head's forward and backward are one use;
// the embedding's backward needs none.
std::vector<UnitUse> ExecutionOrder(int units, bool tied, bool backward) {
  std::vector<UnitUse> uses;
  const int head = units - 1;
  for (int u = 0; u < head; ++u) uses.push_back({.unit = u});
  if (tied) uses.push_back({.unit = 0});
  uses.push_back({.unit = head});
  for (int u = head - 1; u > 0 && backward; --u) uses.push_back({.unit = u, .backward = true});
  return uses;
}

}  // namespace

// Where parameters are offloaded max_live bounds all that is gathered, so room is left for what is
// used in between.
void PlanGathers(const ZeroPolicy& policy, std::vector<UnitUse>* uses) {
  const int n = static_cast<int>(uses->size());
  const int64_t room =
      policy.options.max_live - (policy.options.offload_param ? WidestUse(policy) : 0);
  std::vector<bool> live(policy.layouts.size(), false);
  int64_t kept = 0;
  for (int i = 0; i < n; ++i) {
    UnitUse& use = (*uses)[i];
    const size_t u = static_cast<size_t>(use.unit);
    if (policy.resident[u]) continue;
    const int64_t length = policy.layouts[u].length;
    if (live[u]) {
      kept -= length;
    } else {
      use.gather = true;
    }
    int64_t distance = 0;
    int next = i + 1;
    while (next < n && (*uses)[next].unit != use.unit) {
      distance += policy.layouts[static_cast<size_t>((*uses)[next].unit)].length;
      ++next;
    }
    live[u] = next < n && distance <= policy.options.max_reuse_distance && kept + length <= room;
    if (live[u]) {
      kept += length;
    } else {
      use.release = true;
    }
  }
}

ZeroPolicy MakeZeroPolicy(const ModelTable& model, const ZeroOptions& options) {
  ZeroPolicy p;
  p.options = options;
  p.tied = model.config.tied;
  p.rounds = CeilDiv(options.micro_batches, options.world);
  const bool one_round = p.rounds == 1;
  const bool sharded = options.stage >= 2 && (one_round || !options.full_gradients);
  if (sharded || (options.deterministic && !one_round)) {
    p.gradient_mode = GradientMode::kShard;
  } else {
    p.gradient_mode = one_round ? GradientMode::kFullWire : GradientMode::kFullAccumulate;
  }
  p.accumulate_type = one_round ? options.dtype : DType::kF32;
  for (const UnitTable& unit : model.units) {
    p.layouts.push_back(ShardLayout::Make(unit.length, options.world));
    p.resident.push_back(options.stage < 3 || (options.world == 1 && !options.offload_param) ||
                         unit.length <= options.persistence_threshold);
    p.trained.push_back(unit.AnyTrainable());
  }
  const std::vector<ParameterInfo>& embedding = model.units.front().parameters;
  p.table_trained = !embedding.empty() && embedding.front().trainable;
  const int64_t tokens = options.micro_batch * model.config.sequence;
  p.row_slots = std::min(tokens, model.config.vocab);
  p.sparse_rows = p.gradient_mode != GradientMode::kFullAccumulate &&
                  options.world * p.row_slots <= model.config.vocab;
  p.uses = ExecutionOrder(static_cast<int>(model.units.size()), p.tied, true);
  PlanGathers(p, &p.uses);
  p.eval_uses = ExecutionOrder(static_cast<int>(model.units.size()), p.tied, false);
  PlanGathers(p, &p.eval_uses);
  return p;
}

int ZeroPolicy::Contributors(int64_t round) const {
  return static_cast<int>(
      std::min<int64_t>(options.world, options.micro_batches - round * options.world));
}

bool ZeroPolicy::KeepsParameters(int unit) const {
  return !options.offload_param || resident[static_cast<size_t>(unit)];
}

bool ZeroPolicy::KeepsGradient(int unit) const {
  const bool final_at_once = gradient_mode == GradientMode::kShard && rounds == 1;
  return unit == 0 || !options.offload_optimizer || !final_at_once;
}

int64_t ZeroPolicy::StateBegin(int unit, int rank) const {
  return options.stage == 0 ? 0 : layouts[static_cast<size_t>(unit)].Begin(rank);
}

int64_t ZeroPolicy::StateEnd(int unit, int rank) const {
  const ShardLayout& layout = layouts[static_cast<size_t>(unit)];
  return options.stage == 0 ? layout.length : layout.End(rank);
}

ElementRange TokenTable(const ModelTable& model) {
  if (model.units.front().parameters.empty()) return {};
  const ParameterInfo& table = model.units.front().parameters.front();
  return {table.offset, table.offset + table.size};
}

ElementRange TokenTableBlocks(const ModelTable& model) {
  const ElementRange table = TokenTable(model);
  return {table.begin, RoundUp(table.end, 64)};
}

ElementRange Owned(const ShardLayout& layout, int rank, ElementRange range) {
  const int64_t begin = std::max(range.begin, layout.Begin(rank));
  const int64_t end = std::min(range.end, layout.End(rank));
  return end > begin ? ElementRange{begin, end} : ElementRange{begin, begin};
}

}  // namespace zeroshard
