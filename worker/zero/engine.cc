#include "worker/zero/engine.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint/state_digest.h"
#include "common/kernels/convert.h"
#include "common/plan/nearest.h"
#include "common/status_macros.h"
#include "worker/device/host_event.h"
#include "worker/zero/fill.h"
#include "worker/zero/torn_blocks.h"

namespace zeroshard {
ZeroEngine::ZeroEngine(const ZeroPolicy* policy, Device* device, Ops* ops, Communicator* comm,
                       StateStore* store, const EngineLinks* links)
    : policy_(*policy),
      device_(device),
      compute_(device->compute()),
      state_reads_(device->NewStream("state")),
      ops_(ops),
      comm_(comm),
      store_(store),
      all_(links != nullptr && links->job != nullptr ? links->job : comm),
      slice_(links != nullptr ? links->slice : nullptr),
      uses_(&policy->uses) {}

ZeroEngine::~ZeroEngine() {
  // What is queued on the device reads and writes the units' memory, copies to the host's, and
  // waits for collectives whose events nobody here has any more.
  compute_->Record().Wait().IgnoreError();
  // So does whatever else is still on its way, and with the rows' sums.
  gather_.reset();
  reducer_.reset();
  pusher_.reset();
  rows_.reset();
  tied_table_.reset();
}

absl::StatusOr<std::unique_ptr<ZeroEngine>> ZeroEngine::Create(
    const ModelTable* model, const ZeroPolicy* policy, uint64_t seed, Device* device, Ops* ops,
    Communicator* comm, const std::atomic<bool>* stop, const ParameterSource* weights,
    StateStore* store, const EngineLinks* links) {
  if (policy->options.offload_optimizer != (store != nullptr) ||
      (store != nullptr && policy->options.stage == 0)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "zero_optimization.offload_optimizer is %s at stage %d, and there is %s shard store; "
        "wanted stage 1, 2 or 3 with a store, or neither",
        policy->options.offload_optimizer ? "on" : "off", policy->options.stage,
        store != nullptr ? "a" : "no"));
  }
  std::unique_ptr<ZeroEngine> engine(new ZeroEngine(policy, device, ops, comm, store, links));
  std::vector<UnitState>* units = &engine->units_;
  ZS_ASSIGN_OR_RETURN(*units,
                      MakeUnitStates(*model, *policy, comm->rank(), device, engine->slice_));
  ZS_ASSIGN_OR_RETURN(engine->squares_,
                      GradientSquares::Create(units->size(), device, ops, engine->slice_));
  ZS_RETURN_IF_ERROR(engine->RegisterBuffers());
  if (store != nullptr)
    engine->pusher_ = std::make_unique<GradientPusher>(policy, units, store, device, ops);
  engine->reducer_ = std::make_unique<GradientReducer>(
      policy, units, comm, device, ops, engine->pusher_.get(), engine->squares_.get());
  engine->gather_ = std::make_unique<ParameterGather>(policy, units, comm, device, ops, store);
  if (store != nullptr) {
    ZS_RETURN_IF_ERROR(engine->gather_->PullAll());
  } else {
    const FreshWeights fresh(seed);
    ZS_RETURN_IF_ERROR(FillParameters(weights == nullptr ? fresh : *weights, units, device, stop));
  }
  if (policy->has_rows) {
    ZS_ASSIGN_OR_RETURN(engine->rows_,
                        TokenRows::Create(model, policy, &engine->units_.front(),
                                          engine->reducer_.get(), comm, device, ops));
  }
  if (links != nullptr && links->tied_peer >= 0 && policy->table_trained) {
    ZS_ASSIGN_OR_RETURN(
        engine->tied_table_,
        TiedTable::Create(policy, &engine->units_.front(),
                          Owned(policy->layouts.front(), comm->rank(), TokenTableBlocks(*model)),
                          links->pipeline, links->tied_peer, device, ops));
    engine->reducer_->LeaveEmbedding();
  }
  ZS_RETURN_IF_ERROR(engine->LocateHead(*model));
  return engine;
}

absl::Status ZeroEngine::LocateHead(const ModelTable& model) {
  const UnitTable& head = model.units.back();
  if (head.parameters.empty()) return absl::OkStatus();  // another stage's
  if (model.config.tied) {
    head_matrix_offset_ = model.units.front().parameters.front().offset;
    return absl::OkStatus();
  }
  head_matrix_unit_ = static_cast<int>(model.units.size()) - 1;
  const ParameterInfo* matrix = head.Find("lm_head.weight");
  if (matrix == nullptr) return absl::InternalError("an untied head has no lm_head.weight");
  head_matrix_offset_ = matrix->offset;
  return absl::OkStatus();
}

absl::Status ZeroEngine::RegisterBuffers() {
  const auto add = [this](const Buffer& buffer) -> absl::Status {
    ZS_ASSIGN_OR_RETURN(Registration registration, comm_->Register(buffer.data(), buffer.bytes()));
    registered_.push_back(std::move(registration));
    return absl::OkStatus();
  };
  // The same on every rank, whatever it owns.
  for (const UnitState& unit : units_) {
    if (!unit.trained) continue;
    if (unit.resident && policy_.options.stage > 0) ZS_RETURN_IF_ERROR(add(unit.parameters));
    if (policy_.gradient_mode == GradientMode::kFullWire) ZS_RETURN_IF_ERROR(add(unit.gradient));
    if (unit.full_gradient.bytes() > 0) ZS_RETURN_IF_ERROR(add(unit.full_gradient));
  }
  return absl::OkStatus();
}

absl::Status ZeroEngine::LoadMoments(StateKind kind, const ParameterSource& source,
                                     const std::atomic<bool>* stop) {
  if (store_ != nullptr)
    return absl::FailedPreconditionError("the moments are in the shard stores");
  return FillMoments(kind, source, &units_, device_, stop);
}

void ZeroEngine::SetWaitObserver(WaitObserver* observer) {
  waits_ = observer;
  gather_->SetWaitObserver(observer);
  reducer_->SetWaitObserver(observer);
  if (rows_ != nullptr) rows_->SetWaitObserver(observer);
}

void ZeroEngine::BeginStep(uint64_t step) {
  step_ = step;
  squares_->Begin();
  if (pusher_ != nullptr) pusher_->BeginStep(step);
  if (rows_ != nullptr) rows_->BeginStep();
  if (policy_.uses_span_step) BeginUses(&policy_.uses);
}

void ZeroEngine::BeginUses(const std::vector<UnitUse>* uses) {
  next_use_ = 0;
  uses_ = uses;
  gather_->BeginPass(uses_);
}

void ZeroEngine::BeginRound(int64_t round) {
  round_ = round;
  if (!policy_.uses_span_step) BeginUses(&policy_.uses);
  reducer_->BeginRound(step_, round, policy_.Contributors(round));
}

void ZeroEngine::BeginEvaluation(uint64_t step, const std::vector<UnitUse>* uses) {
  step_ = step;
  BeginUses(uses != nullptr ? uses : &policy_.eval_uses);
}

absl::StatusOr<const void*> ZeroEngine::NextUse(int unit, bool backward) {
  if (next_use_ >= uses_->size() || (*uses_)[next_use_].unit != unit ||
      (*uses_)[next_use_].backward != backward) {
    return absl::InternalError(absl::StrFormat("unit %d is used out of order, as use %d of %d",
                                               unit, next_use_, uses_->size()));
  }
  open_uses_.push_back(static_cast<int>(next_use_));
  return gather_->BeforeUse(static_cast<int>(next_use_++), step_);
}

void ZeroEngine::EndUses() {
  for (int use : open_uses_) gather_->AfterUse(use);
  open_uses_.clear();
}

absl::StatusOr<UnitParameters> ZeroEngine::BeforeForward(int unit) {
  UnitParameters parameters;
  const bool head = unit + 1 == static_cast<int>(units_.size());
  if (head && policy_.tied) {
    ZS_ASSIGN_OR_RETURN(parameters.lm_head, NextUse(0, false));
  }
  ZS_ASSIGN_OR_RETURN(parameters.own, NextUse(unit, false));
  if (head) {
    const void* unit_start = policy_.tied ? parameters.lm_head : parameters.own;
    parameters.lm_head = static_cast<const char*>(unit_start) +
                         head_matrix_offset_ * static_cast<int64_t>(SizeOf(units_[0].dtype));
  }
  return parameters;
}

absl::Status ZeroEngine::AfterForward(int unit) {
  EndUses();
  return absl::OkStatus();
}

absl::StatusOr<UnitParameters> ZeroEngine::BeforeBackward(int unit) {
  UnitParameters parameters;
  ZS_ASSIGN_OR_RETURN(parameters.own, NextUse(unit, true));
  return parameters;
}

absl::Status ZeroEngine::AfterBackward(int unit) {
  EndUses();
  if (unit != 0) return absl::OkStatus();
  return rows_->Reduce(step_, round_, policy_.Contributors(round_));
}

absl::StatusOr<NormAccumulator> ZeroEngine::FinishGradients(std::string* first_nonfinite) {
  {
    Waiting waiting(waits_, WaitKind::kRanks);
    ZS_RETURN_IF_ERROR(reducer_->FinishRounds());
    if (rows_ != nullptr) ZS_RETURN_IF_ERROR(rows_->Join());
  }
  if (tied_table_ != nullptr) {
    Waiting waiting(waits_, WaitKind::kStages);
    ZS_RETURN_IF_ERROR(tied_table_->Join(step_));
  }
  if (pusher_ != nullptr) ZS_RETURN_IF_ERROR(PushEmbedding());
  const Event read = ReadSquares();
  if (policy_.options.stage == 0) {
    ZS_RETURN_IF_ERROR(GatherShardedGradients());
    // The step ends with an exchange on another line, before which all traffic is to be counted.
    if (all_ != comm_) ZS_RETURN_IF_ERROR(compute_->Record().Wait());
  }
  if (pusher_ != nullptr) {
    Waiting waiting(waits_, WaitKind::kStores);
    ZS_RETURN_IF_ERROR(pusher_->Drain());
    ZS_RETURN_IF_ERROR(reducer_->Drain());
  }
  ZS_RETURN_IF_ERROR(read.Wait());
  NormAccumulator norm;
  for (size_t u = 0; u < units_.size(); ++u) {
    const NormAccumulator& squares = squares_->Of(u);
    norm.Add(squares);
    if (squares.nonfinite > 0 && first_nonfinite->empty()) *first_nonfinite = units_[u].table->name;
  }
  return norm;
}

// What else there is of it has joined its sum. With kFullAccumulate it left behind its reduction,
// unless another rank's part of a tied table was to come; and of two ends the first one pushes.
absl::Status ZeroEngine::PushEmbedding() {
  const bool left =
      policy_.gradient_mode == GradientMode::kFullAccumulate && tied_table_ == nullptr;
  const UnitState& embedding = units_.front();
  if (embedding.trained && !left && !policy_.copies_table)
    pusher_->Push(0, {embedding.own_begin, embedding.own_end}, compute_->Record());
  return pusher_->FinishRounding();
}

Event ZeroEngine::ReadSquares() {
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    const UnitState& unit = units_[static_cast<size_t>(u)];
    if (!unit.trained || unit.owned() == 0 || !policy_.KeepsGradient(u)) continue;
    if (u == 0 && policy_.copies_table) continue;
    squares_->Add(u, {unit.own_begin, unit.own_end}, unit.Gradient(unit.own_begin),
                  unit.gradient_type);
  }
  const Event read = squares_->Read();
  // And the errors of what was computed since the update before, and of that.
  return AllOf({updated_, read, compute_->Record()});
}

// Stage 0 updates everything everywhere: the sums go from their owners to all.
absl::Status ZeroEngine::GatherShardedGradients() {
  const DType wire = policy_.options.dtype;
  std::vector<GatherPart> together;
  for (UnitState& unit : units_) {
    if (!unit.trained) continue;
    if (policy_.gradient_mode == GradientMode::kFullAccumulate && unit.gradient_type != wire) {
      ZS_RETURN_IF_ERROR(GatherThroughWire(&unit));
      continue;
    }
    void* whole = unit.gradient.data();
    if (policy_.gradient_mode == GradientMode::kShard) whole = unit.full_gradient.data();
    if (whole != unit.gradient.data()) OwnSumsTo(unit, whole);
    together.push_back({whole, unit.layout.shard});
  }
  if (together.empty()) return absl::OkStatus();
  const std::vector<Event> events = comm_->AllGatherTogether(
      together, wire, {.phase = Phase::kStep, .unit = "gradients", .step = step_},
      compute_->Record());
  Waiting waiting(waits_, WaitKind::kRanks);
  for (const Event& event : events) ZS_RETURN_IF_ERROR(compute_->WaitFor(event));
  return absl::OkStatus();
}

// Sums that are kept in fp32 travel in the wire type, which they were rounded to.
absl::Status ZeroEngine::GatherThroughWire(UnitState* unit) {
  const DType wire = policy_.options.dtype;
  ZS_ASSIGN_OR_RETURN(Buffer whole, reducer_->TakeTransient(
                                        static_cast<size_t>(unit->layout.Padded()) * SizeOf(wire)));
  OwnSumsTo(*unit, whole.data());
  const Event gathered = comm_->AllGather(
      whole.data(), unit->layout.shard, wire,
      {.phase = Phase::kStep, .unit = unit->table->name, .step = step_}, compute_->Record());
  Waiting waiting(waits_, WaitKind::kRanks);
  ZS_RETURN_IF_ERROR(compute_->WaitFor(gathered));
  ops_->Convert(whole.data(), wire, unit->layout.length, unit->gradient.data(), DType::kF32);
  reducer_->GiveTransient(std::move(whole));
  return absl::OkStatus();
}

void ZeroEngine::OwnSumsTo(const UnitState& unit, void* whole) {
  const DType wire = policy_.options.dtype;
  if (unit.owned() == 0) return;
  ops_->Convert(unit.Gradient(unit.own_begin), unit.gradient_type, unit.owned(),
                static_cast<char*>(whole) + unit.own_begin * static_cast<int64_t>(SizeOf(wire)),
                wire);
}

void ZeroEngine::UpdateUnit(UnitState* unit, const AdamWArgs& args) {
  const bool full = policy_.options.stage == 0 && policy_.gradient_mode == GradientMode::kShard;
  const DType gradient_type = full ? policy_.options.dtype : unit->gradient_type;
  for (const SliceRun& run : unit->Runs({unit->state_begin, unit->state_end})) {
    const ParameterInfo& info = unit->table->parameters[static_cast<size_t>(run.parameter)];
    if (!info.trainable) continue;
    const int64_t begin = run.local;
    AdamWArgs adamw = args;
    if (!info.decay) adamw.weight_decay = 0;
    adamw.rounding = unit->rounding.From(run.flat);
    const void* gradient =
        full ? unit->full_gradient.as<char>() + begin * static_cast<int64_t>(SizeOf(gradient_type))
             : unit->Gradient(begin);
    ops_->AdamW(adamw, run.size, gradient, gradient_type, unit->Master(begin),
                unit->exp_avg.as<float>() + (begin - unit->state_begin),
                unit->exp_avg_sq.as<float>() + (begin - unit->state_begin), unit->Parameter(begin),
                unit->dtype);
  }
}

absl::Status ZeroEngine::Update(const AdamWArgs& args) {
  for (UnitState& unit : units_) {
    if (unit.trained) UpdateUnit(&unit, args);
  }
  updated_ = compute_->Record();
  return gather_->GatherUpdated(step_);
}

absl::Status ZeroEngine::PullUpdated() { return gather_->PullUpdated(step_); }

absl::Status ZeroEngine::Drain() {
  ZS_RETURN_IF_ERROR(reducer_->Drain());
  if (pusher_ != nullptr) ZS_RETURN_IF_ERROR(pusher_->Drain());
  ZS_RETURN_IF_ERROR(gather_->Drain());
  return AllOf({updated_, compute_->Record()}).Wait();
}

absl::Status ZeroEngine::CopyState(StateKind kind, int unit_index, int64_t begin, int64_t end,
                                   float* out) const {
  if (begin >= end) return absl::OkStatus();
  const UnitState& unit = units_[static_cast<size_t>(unit_index)];
  if (kind == StateKind::kMaster && !unit.KeepsMaster())
    return ReadParameters(unit.Parameter(begin), unit.dtype, end - begin, updated_, out);
  const float* from = kind == StateKind::kMaster ? unit.Master(begin)
                      : kind == StateKind::kExpAvg
                          ? unit.exp_avg.as<float>() + (begin - unit.state_begin)
                          : unit.exp_avg_sq.as<float>() + (begin - unit.state_begin);
  return state_reads_->Copy(out, from, static_cast<size_t>(end - begin) * sizeof(float), updated_)
      .Wait();
}

absl::Status ZeroEngine::ReadParameters(const void* from, DType type, int64_t n, const Event& after,
                                        float* out) const {
  const size_t bytes = static_cast<size_t>(n) * SizeOf(type);
  if (type == DType::kF32) return state_reads_->Copy(out, from, bytes, after).Wait();
  std::vector<char> values(bytes);
  ZS_RETURN_IF_ERROR(state_reads_->Copy(values.data(), from, bytes, after).Wait());
  cpu::Convert(values.data(), type, n, out, DType::kF32, 1);
  return absl::OkStatus();
}

std::vector<OwnedRange> ZeroEngine::OwnedRanges() const {
  std::vector<OwnedRange> ranges;
  if (store_ != nullptr) return ranges;
  for (size_t u = 0; u < units_.size(); ++u) {
    if (u == 0 && policy_.copies_table) continue;
    const UnitState& unit = units_[u];
    OwnedRange range{.unit = static_cast<int>(u),
                     .begin = unit.own_begin,
                     .end = unit.own_end,
                     .flat = unit.own_begin,
                     .trained = unit.trained,
                     .keeps_master = unit.KeepsMaster()};
    if (slice_ == nullptr) {
      ranges.push_back(range);
      continue;
    }
    for (const SliceRun& run : unit.Runs({unit.own_begin, unit.own_end})) {
      if (!run.home) continue;
      range.begin = run.local;
      range.end = run.local + run.size;
      range.flat = run.flat;
      range.ends = run.ends;
      ranges.push_back(range);
    }
  }
  return ranges;
}

absl::StatusOr<PartedDigest> ZeroEngine::OwnDigest(StateKind kind, bool as_filled) const {
  PartedDigest digest;
  const auto filled = [&](const UnitState& unit) {
    return kind == StateKind::kMaster && as_filled && !unit.KeepsMaster();
  };
  for (const UnitState& unit : units_) {
    if (filled(unit) && !(unit.index == 0 && policy_.copies_table)) digest.Combine(unit.filled);
  }
  std::vector<float> piece;
  constexpr int64_t kPiece = int64_t{1} << 20;
  for (const OwnedRange& range : OwnedRanges()) {
    if (kind != StateKind::kMaster && !range.trained) continue;
    if (filled(units_[static_cast<size_t>(range.unit)])) continue;
    for (int64_t at = range.begin; at < range.end; at += kPiece) {
      const int64_t end = std::min(at + kPiece, range.end);
      piece.resize(static_cast<size_t>(end - at));
      ZS_RETURN_IF_ERROR(CopyState(kind, range.unit, at, end, piece.data()));
      digest.Add(static_cast<uint64_t>(range.unit),
                 static_cast<uint64_t>(range.flat + at - range.begin), piece,
                 range.ends && end == range.end);
    }
  }
  return digest;
}

absl::StatusOr<std::vector<WeightDigest>> ZeroEngine::CombineDigests(
    const std::vector<PartedDigest>& own) {
  const size_t n = own.size();
  std::vector<WeightDigest> all(static_cast<size_t>(all_->size()) * n);
  for (size_t i = 0; i < n; ++i) all[static_cast<size_t>(all_->rank()) * n + i] = own[i].whole;
  ZS_RETURN_IF_ERROR(all_->AllGatherHost(all.data(), static_cast<int64_t>(n * sizeof(WeightDigest)),
                                         {.unit = "weights digest", .step = step_}));
  std::vector<WeightDigest> total(n);
  for (size_t i = 0; i < all.size(); ++i) total[i % n].Combine(all[i]);
  // Every rank of a mesh has a slice, or none: whole units are not torn.
  if (slice_ != nullptr) ZS_RETURN_IF_ERROR(AddTornBlocks(own, &total));
  return total;
}

absl::Status ZeroEngine::AddTornBlocks(const std::vector<PartedDigest>& own,
                                       std::vector<WeightDigest>* total) {
  ZS_ASSIGN_OR_RETURN(const std::vector<BlockPart> all,
                      GatherParts(all_, PartsOf(own.data(), own.size()),
                                  {.unit = "weights digest", .step = step_}));
  for (size_t kind = 0; kind < own.size(); ++kind) {
    ZS_ASSIGN_OR_RETURN(const WeightDigest joined, JoinParts(OfKind(all, kind)));
    (*total)[kind].Combine(joined);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ZeroEngine::WeightsDigest() {
  ZS_RETURN_IF_ERROR(Drain());
  if (store_ != nullptr) return std::string();
  ZS_ASSIGN_OR_RETURN(const PartedDigest own, OwnDigest(StateKind::kMaster, false));
  ZS_ASSIGN_OR_RETURN(const std::vector<WeightDigest> total, CombineDigests({own}));
  return total[0].Hex();
}

absl::StatusOr<std::array<std::string, kStateKinds>> ZeroEngine::LoadedDigests() {
  std::vector<PartedDigest> own;
  for (int kind = 0; kind < kStateKinds; ++kind) {
    ZS_ASSIGN_OR_RETURN(PartedDigest digest, OwnDigest(static_cast<StateKind>(kind), true));
    own.push_back(std::move(digest));
  }
  ZS_ASSIGN_OR_RETURN(const std::vector<WeightDigest> total, CombineDigests(own));
  std::array<std::string, kStateKinds> digests;
  for (size_t kind = 0; kind < digests.size(); ++kind) digests[kind] = total[kind].Hex();
  return digests;
}

absl::StatusOr<ZeroEngine::Located> ZeroEngine::Locate(const std::string& name) {
  std::vector<std::string> names;
  for (UnitState& unit : units_) {
    for (const ParameterInfo& info : unit.table->parameters) {
      if (info.name == name) return Located{&unit, &info};
      names.push_back(info.name);
    }
  }
  return absl::NotFoundError(absl::StrCat("the model has no tensor '", name, "'; the nearest are ",
                                          absl::StrJoin(NearestNames(name, names, 3), ", ")));
}

absl::Status ZeroEngine::SetTensor(const std::string& name, absl::Span<const float> values) {
  if (store_ != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, " cannot be set: the weights are in the shard stores"));
  }
  ZS_ASSIGN_OR_RETURN(const Located at, Locate(name));
  UnitState& unit = *at.unit;
  const auto parameter = static_cast<size_t>(at.info - unit.table->parameters.data());
  const int64_t size =
      slice_ == nullptr ? at.info->size : FullParameter(*slice_, unit.index, parameter).size;
  if (static_cast<int64_t>(values.size()) != size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has %d elements, not %d", name, size, values.size()));
  }
  const ElementRange range{at.info->offset, at.info->offset + at.info->size};
  for (const SliceRun& run : unit.Runs(range)) {
    ZS_RETURN_IF_ERROR(SetRange(
        &unit, run.local,
        values.subspan(static_cast<size_t>(run.element), static_cast<size_t>(run.size)), device_));
  }
  return absl::OkStatus();
}

absl::Status ZeroEngine::OwnValues(const UnitState& unit, float* out) {
  const int index = static_cast<int>(&unit - units_.data());
  if (unit.owned() == 0) return absl::OkStatus();
  if (store_ == nullptr)
    return CopyState(StateKind::kMaster, index, unit.own_begin, unit.own_end, out);
  if (unit.keeps_parameters)
    return ReadParameters(unit.Parameter(unit.own_begin), unit.dtype, unit.owned(),
                          compute_->Record(), out);
  ZS_ASSIGN_OR_RETURN(const Buffer pulled,
                      device_->Allocate(static_cast<size_t>(unit.owned()) * SizeOf(unit.dtype),
                                        MemoryKind::kBuffers));
  return ReadParameters(pulled.data(), unit.dtype, unit.owned(),
                        store_->Pull(gather_->version(), index, unit.own_begin, unit.own_end,
                                     pulled.data(), compute_->Record()),
                        out);
}

absl::StatusOr<std::vector<float>> ZeroEngine::GatherTensor(const std::string& name) {
  ZS_ASSIGN_OR_RETURN(const Located at, Locate(name));
  const UnitState& unit = *at.unit;
  ZS_RETURN_IF_ERROR(Drain());
  std::vector<float> whole(static_cast<size_t>(unit.layout.Padded()));
  ZS_RETURN_IF_ERROR(OwnValues(unit, whole.data() + unit.own_begin));
  ZS_RETURN_IF_ERROR(comm_->AllGatherHost(whole.data(),
                                          unit.layout.shard * static_cast<int64_t>(sizeof(float)),
                                          {.unit = unit.table->name, .step = step_}));
  const auto first = whole.begin() + at.info->offset;
  return std::vector<float>(first, first + at.info->size);
}

}  // namespace zeroshard
