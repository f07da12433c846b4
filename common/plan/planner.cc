#include "common/plan/planner.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/plan/activation_table.h"
#include "common/plan/chunk_table.h"
#include "common/plan/mesh.h"
#include "common/plan/offload.h"

namespace zeroshard {
namespace {

using namespace traffic;

uint64_t SaturatingProduct(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<uint64_t>::max() : product;
}

// A rank's shard of a unit in the wire type, which is that of the parameters too: what it pushes
// of it, and what it pulls.
struct ShardBytes {
  uint64_t push = 0, pull = 0;
};

ShardBytes ShardOf(const ZeroPolicy& policy, size_t unit, int rank, const TensorRank* stored) {
  const ShardLayout& layout = policy.layouts[unit];
  const ElementRange owned{layout.Begin(rank), layout.End(rank)};
  const auto bytes = [&policy](int64_t elements) {
    return static_cast<uint64_t>(elements) * SizeOf(policy.options.dtype);
  };
  if (stored == nullptr) return {bytes(owned.size()), bytes(owned.size())};
  const std::vector<SliceRun> runs = FullRuns(*stored, unit, owned);
  return {bytes(PushedElements(runs)), bytes(PulledElements(runs))};
}

// What a rank pulls for the gathers of `uses`.
uint64_t GatherPullBytes(const ZeroPolicy& policy, const std::vector<UnitUse>& uses, int rank,
                         const TensorRank* stored) {
  std::vector<uint64_t> once(policy.layouts.size(), 0);
  std::vector<bool> known(policy.layouts.size(), false);
  uint64_t bytes = 0;
  for (const UnitUse& use : uses) {
    if (!use.gather || policy.KeepsParameters(use.unit)) continue;
    const auto u = static_cast<size_t>(use.unit);
    if (!known[u]) once[u] = ShardOf(policy, u, rank, stored).pull;
    known[u] = true;
    bytes += once[u];
  }
  return bytes;
}

class RankPlanner {
 public:
  // The step's end is exchanged between `ranks`.
  RankPlanner(const ModelTable& model, const ZeroPolicy& policy, int rank, int ranks,
              const TensorRank* stored = nullptr)
      : model_(model),
        policy_(policy),
        options_(policy.options),
        stored_(stored),
        rank_(rank),
        ranks_(ranks) {
    wire_ = SizeOf(options_.dtype);
    accumulate_ = SizeOf(policy.accumulate_type);
    peers_ = static_cast<uint64_t>(options_.world - 1);
    blocks_ = TokenTableBlocks(model);
  }

  RankPlan Plan() {
    for (size_t u = 0; u < model_.units.size(); ++u) Memory(u);
    EmbeddingMemory();
    plan_.activations = static_cast<uint64_t>(ActivationBytes(
        model_.config, options_.micro_batch, options_.dtype, options_.checkpointing));
    if (options_.world > 1) Traffic();
    if (ranks_ > 1)
      Add(kAllGather, kStep,
          static_cast<uint64_t>(StatsBytes(policy_.rounds)) * static_cast<uint64_t>(ranks_ - 1));
    if (options_.offload_optimizer) StoreTraffic();
    return plan_;
  }

  RankPlan Plan(const StageModel& stage, const RankSchedule& schedule, const TensorShare& share) {
    Plan();
    plan_.activations = static_cast<uint64_t>(StageActivationBytes(stage, options_, schedule));
    AddTensorTraffic(stage, schedule, share);
    const uint64_t boundary =
        static_cast<uint64_t>(BoundaryElements(model_.config, options_)) * wire_;
    for (const Action& action : schedule.actions) {
      for (const StageTransfer& transfer : action.transfers)
        if (transfer.send) Add(kSend, transfer.gradient ? kBackward : kForward, boundary);
    }
    if (stage.tied_peer >= 0 && policy_.table_trained)
      Add(kSend, kStep, OwnedBytes(0, blocks_) * wire_);
    return plan_;
  }

 private:
  // Ranks without a micro-batch in a ragged last round send as the others do.
  void AddTensorTraffic(const StageModel& stage, const RankSchedule& schedule,
                        const TensorShare& share) {
    for (int u = 0; u < static_cast<int>(model_.units.size()); ++u) {
      if (!stage.Runs(u)) continue;
      const TrafficTable once =
          TensorTraffic(model_.config, model_.units[static_cast<size_t>(u)], share,
                        options_.micro_batch, options_.dtype, options_.checkpointing);
      for (size_t op = 0; op < once.size(); ++op) {
        for (size_t phase = 0; phase < once[op].size(); ++phase) {
          const uint64_t bytes = SaturatingProduct(
              once[op][phase], static_cast<uint64_t>(schedule.shape.micro_batches));
          Add(op, phase, bytes);
          plan_.tensor[op][phase] += bytes;
        }
      }
    }
  }

  uint64_t OwnedBytes(size_t u, ElementRange range) const {
    return static_cast<uint64_t>(Owned(policy_.layouts[u], rank_, range).size());
  }

  void Memory(size_t u) {
    const ShardLayout& layout = policy_.layouts[u];
    const uint64_t owned = static_cast<uint64_t>(layout.End(rank_) - layout.Begin(rank_));
    const uint64_t padded = static_cast<uint64_t>(layout.Padded());
    plan_.owned_parameters += owned;
    const int unit = static_cast<int>(u);
    if (policy_.KeepsParameters(unit))
      plan_.parameters += (policy_.resident[u] ? padded : owned) * wire_;
    if (!policy_.trained[u]) return;
    if (!options_.offload_optimizer) {
      const uint64_t state =
          static_cast<uint64_t>(policy_.StateEnd(unit, rank_) - policy_.StateBegin(unit, rank_));
      plan_.optimizer += state * (options_.dtype == DType::kF32 ? 8 : 12);
    }
    if (!policy_.KeepsGradient(unit)) return;
    switch (policy_.gradient_mode) {
      case GradientMode::kShard:
        plan_.gradients += owned * accumulate_;
        if (options_.stage == 0) plan_.gradients += padded * wire_;
        break;
      case GradientMode::kFullWire:
        plan_.gradients += padded * wire_;
        break;
      case GradientMode::kFullAccumulate:
        plan_.gradients += padded * 4;
        break;
    }
  }

  void EmbeddingMemory() {
    if (!policy_.table_trained || !policy_.has_rows ||
        policy_.gradient_mode == GradientMode::kFullAccumulate) {
      return;
    }
    if (policy_.sparse_rows) {
      plan_.gradients +=
          static_cast<uint64_t>(RowCapacity(model_, policy_, rank_) * model_.config.hidden * 4);
    } else if (policy_.tied) {
      plan_.gradients += OwnedBytes(0, blocks_) * accumulate_;
    }
  }

  // Bytes this rank sends when `range` of a unit is reduced.
  uint64_t ReduceBytes(size_t u, ElementRange range) const {
    return (static_cast<uint64_t>(range.size()) - OwnedBytes(u, range)) * wire_;
  }

  // Every round but the last is the same on every rank; the last may be ragged.
  void Traffic() {
    RoundTraffic(true);
    for (auto& row : plan_.step) {
      for (uint64_t& bytes : row)
        bytes = SaturatingProduct(bytes, static_cast<uint64_t>(policy_.rounds - 1));
    }
    RoundTraffic(rank_ < policy_.Contributors(policy_.rounds - 1));
    if (policy_.uses_span_step) GatherTraffic();
    for (size_t u = 0; u < model_.units.size(); ++u) StepTraffic(u);
  }

  void Add(size_t op, size_t phase, uint64_t bytes) {
    uint64_t& sum = plan_.step[op][phase];
    if (__builtin_add_overflow(sum, bytes, &sum)) sum = std::numeric_limits<uint64_t>::max();
  }

  void GatherTraffic() {
    for (const UnitUse& use : policy_.uses) {
      if (!use.gather) continue;
      const uint64_t shard =
          static_cast<uint64_t>(policy_.layouts[static_cast<size_t>(use.unit)].shard);
      Add(kAllGather, use.backward ? kBackward : kForward, shard * peers_ * wire_);
    }
  }

  void RoundTraffic(bool contributes) {
    if (!policy_.uses_span_step) GatherTraffic();
    if (policy_.gradient_mode == GradientMode::kFullAccumulate) return;
    for (size_t u = 0; u < model_.units.size() && contributes; ++u) {
      if (!policy_.trained[u]) continue;
      ElementRange range{0, model_.units[u].length};
      // Of the embedding, the head's part where tied; the rows are counted below.
      if (u == 0 && !policy_.tied) range.begin = blocks_.end;
      if (u == 0 && !policy_.has_rows) range.end = blocks_.end;
      Add(kReduceScatter, kBackward, ReduceBytes(u, range));
    }
    if (!policy_.table_trained || !policy_.has_rows) return;
    if (policy_.sparse_rows) {
      const uint64_t row = 4 + static_cast<uint64_t>(model_.config.hidden) * wire_;
      Add(kAllGather, kBackward, static_cast<uint64_t>(policy_.row_slots) * row * peers_);
    } else if (contributes) {
      Add(kReduceScatter, kBackward, ReduceBytes(0, blocks_));
    }
  }

  void StepTraffic(size_t u) {
    if (!policy_.trained[u]) return;
    if (policy_.gradient_mode == GradientMode::kFullAccumulate)
      Add(kReduceScatter, kStep, ReduceBytes(u, {0, model_.units[u].length}));
    // Stage 0 gathers gradients, the others the parameters that they keep whole.
    if (options_.stage == 0 || policy_.resident[u])
      Add(kAllGather, kStep, static_cast<uint64_t>(policy_.layouts[u].shard) * peers_ * wire_);
  }

  // Only ranks that own something of a unit have to do with the stores for it.
  void StoreTraffic() {
    for (size_t u = 0; u < model_.units.size(); ++u) {
      if (!policy_.trained[u]) continue;
      const ShardBytes bytes = ShardOf(policy_, u, rank_, stored_);
      // The copy of a tied table is pushed where it is counted.
      if (u > 0 || !policy_.copies_table)
        plan_.push += bytes.push * static_cast<uint64_t>(options_.replicas);
      if (policy_.KeepsParameters(static_cast<int>(u))) plan_.pull += bytes.pull;
    }
    const int64_t times = policy_.uses_span_step ? 1 : policy_.rounds;
    const uint64_t gathered = SaturatingProduct(
        GatherPullBytes(policy_, policy_.uses, rank_, stored_), static_cast<uint64_t>(times));
    if (__builtin_add_overflow(plan_.pull, gathered, &plan_.pull))
      plan_.pull = std::numeric_limits<uint64_t>::max();
  }

  const ModelTable& model_;
  const ZeroPolicy& policy_;
  const ZeroOptions& options_;
  const TensorRank* const stored_;
  const int rank_, ranks_;
  uint64_t wire_ = 0, accumulate_ = 0, peers_ = 0;
  ElementRange blocks_;
  RankPlan plan_;
};

}  // namespace

uint64_t RankPlan::StepBytes() const {
  uint64_t sum = 0;
  for (const auto& row : step) {
    for (uint64_t bytes : row) {
      if (__builtin_add_overflow(sum, bytes, &sum)) return std::numeric_limits<uint64_t>::max();
    }
  }
  return sum;
}

RankPlan PlanRank(const ModelTable& model, const ZeroPolicy& policy, int rank) {
  return RankPlanner(model, policy, rank, policy.options.world).Plan();
}

RankPlan PlanRank(const StageModel& stage, const ZeroPolicy& policy, const RankSchedule& schedule,
                  int data, int ranks, const TensorShare& share, const TensorRank* stored) {
  return RankPlanner(stage.model, policy, data, ranks, stored).Plan(stage, schedule, share);
}

TrafficTable PlanEvaluation(const ModelTable& model, const ZeroPolicy& policy,
                            int64_t micro_batches) {
  TrafficTable table{};
  const uint64_t peers = static_cast<uint64_t>(policy.options.world - 1);
  const uint64_t rounds = static_cast<uint64_t>(CeilDiv(micro_batches, policy.options.world));
  for (const UnitUse& use : policy.eval_uses) {
    if (!use.gather) continue;
    const ShardLayout& layout = policy.layouts[static_cast<size_t>(use.unit)];
    table[kAllGather][kForward] += rounds * static_cast<uint64_t>(layout.shard) * peers *
                                   static_cast<uint64_t>(SizeOf(policy.options.dtype));
  }
  table[kAllGather][kForward] += rounds * static_cast<uint64_t>(kStatsRoundBytes) * peers;
  return table;
}

uint64_t PlanEvaluationPull(const ZeroPolicy& policy, int rank, int64_t micro_batches) {
  const int64_t rounds = CeilDiv(micro_batches, policy.options.world);
  return SaturatingProduct(GatherPullBytes(policy, policy.eval_uses, rank, {}),
                           static_cast<uint64_t>(rounds));
}

absl::StatusOr<std::vector<v1::ShardPlan>> PlanShards(const v1::JobSpec& spec) {
  absl::StatusOr<ModelTable> model = MakeModelTable(spec.model());
  if (!model.ok()) return model.status();
  const int world = static_cast<int>(std::max<uint32_t>(1, spec.resources().workers()));
  const absl::StatusOr<std::vector<RankPlan>> ranks = PlanRanks(spec, *model, world);
  if (!ranks.ok()) return ranks.status();
  std::vector<v1::ShardPlan> plans;
  for (const RankPlan& plan : *ranks) {
    v1::ShardPlan& out = plans.emplace_back();
    out.set_rank(static_cast<uint32_t>(plans.size() - 1));
    out.set_owned_parameters(plan.owned_parameters);
    out.set_parameter_bytes(plan.parameters);
    out.set_gradient_bytes(plan.gradients);
    out.set_optimizer_bytes(plan.optimizer);
    out.set_activation_bytes(plan.activations);
    out.set_traffic_bytes_per_step(plan.StepBytes());
    out.set_push_bytes_per_step(plan.push);
    out.set_pull_bytes_per_step(plan.pull);
  }
  return plans;
}

absl::StatusOr<v1::StorePlan> PlanStore(const v1::JobSpec& spec) {
  v1::StorePlan plan;
  if (!IsOffloaded(spec)) return plan;
  absl::StatusOr<ModelTable> model = MakeModelTable(spec.model());
  if (!model.ok()) return model.status();
  const DType type = ComputeType(spec);
  uint64_t state = 0, staging = 0;
  for (const UnitTable& unit : model->units) {
    const Chunk whole{.end = unit.length, .trained = unit.AnyTrainable()};
    const ChunkBytes bytes = BytesOf(whole, type, UsesSgd(spec));
    state += bytes.State();
    staging += bytes.staging;
  }
  plan.set_chunks(static_cast<uint64_t>(ChunkCount(*model)));
  plan.set_state_bytes(state);
  plan.set_staging_bytes(staging);
  plan.set_replicas(std::max<uint32_t>(1, spec.store().replicas()));
  return plan;
}

std::string NoteOnLiveParameters(const v1::JobSpec& spec) {
  if (spec.zero_optimization().stage() != 3 || !OffloadsParameters(spec)) return "";
  if (spec.train_micro_batch_size_per_gpu() == 0) return "";  // not filled in
  const absl::StatusOr<ModelTable> model = MakeModelTable(spec.model());
  if (!model.ok()) return "";
  const int world = static_cast<int>(std::max<uint32_t>(1, spec.resources().workers()));
  const ZeroPolicy policy = MakeZeroPolicy(*model, MakeZeroOptions(spec, world));
  const int64_t widest = WidestUse(policy);
  if (policy.options.max_live >= widest) return "";
  return absl::StrCat("zero_optimization.stage3_max_live_parameters: seen ",
                      policy.options.max_live, ", but the widest step of this model gathers ",
                      widest,
                      " parameters at once, so that many are live then and nothing is kept "
                      "or fetched ahead; write ",
                      widest, " or more for a bound that holds");
}

uint64_t CheckpointCopyBytes(const ModelTable& model, const ZeroPolicy& policy, int rank) {
  if (policy.options.offload_optimizer) return 0;
  uint64_t bytes = 0;
  for (size_t u = 0; u < model.units.size(); ++u) {
    const ShardLayout& layout = policy.layouts[u];
    const uint64_t owned = static_cast<uint64_t>(layout.End(rank) - layout.Begin(rank));
    bytes += owned * (policy.trained[u] ? 12 : 4);  // master, exp_avg, exp_avg_sq
  }
  return bytes;
}

double ModelStateBytes(double parameters, int ranks, int stage) {
  const double n = ranks;
  const double weights = stage >= 3 ? 2 / n : 2;
  const double gradients = stage >= 2 ? 2 / n : 2;
  const double optimizer = stage >= 1 ? 12 / n : 12;
  return parameters * (weights + gradients + optimizer);
}

int64_t RowsTouched(ElementRange table, ElementRange owned, int64_t columns) {
  if (owned.size() == 0) return 0;
  return CeilDiv(owned.end - table.begin, columns) - (owned.begin - table.begin) / columns;
}

int64_t RowCapacity(const ModelTable& model, const ZeroPolicy& policy, int rank) {
  const ElementRange table = TokenTable(model);
  const ElementRange owned = Owned(policy.layouts[0], rank, table);
  return std::min(RowsTouched(table, owned, model.config.hidden),
                  policy.options.micro_batches * policy.row_slots);
}

}  // namespace zeroshard
