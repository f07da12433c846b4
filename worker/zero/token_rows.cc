#include "worker/zero/token_rows.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "common/status_macros.h"

namespace zeroshard {
namespace {

constexpr int64_t kPiece = int64_t{1} << 16;  // elements joined at a time

size_t Bytes(int64_t elements, DType type) { return static_cast<size_t>(elements) * SizeOf(type); }

}  // namespace

TokenRows::TokenRows(const ModelTable* model, const ZeroPolicy* policy, UnitState* embedding,
                     GradientReducer* reducer, Communicator* comm, Device* device, Ops* ops)
    : config_(model->config),
      policy_(*policy),
      unit_(*embedding),
      reducer_(reducer),
      comm_(comm),
      ops_(ops),
      table_(TokenTable(*model)),
      blocks_(TokenTableBlocks(*model)),
      owned_(Owned(embedding->layout, comm->rank(), table_)),
      first_row_((owned_.begin - table_.begin) / model->config.hidden),
      wire_(policy->options.dtype) {}

TokenRows::~TokenRows() {
  gathered_ids_.Wait().IgnoreError();
  gathered_rows_.Wait().IgnoreError();
}

absl::StatusOr<std::unique_ptr<TokenRows>> TokenRows::Create(
    const ModelTable* model, const ZeroPolicy* policy, UnitState* embedding,
    GradientReducer* reducer, Communicator* comm, Device* device, Ops* ops) {
  std::unique_ptr<TokenRows> rows(
      new TokenRows(model, policy, embedding, reducer, comm, device, ops));
  ZS_RETURN_IF_ERROR(rows->Allocate(device));
  if (policy->sparse_rows && policy->table_trained) {
    const int64_t capacity = RowCapacity(*model, *policy, comm->rank());
    ZS_ASSIGN_OR_RETURN(rows->sums_,
                        device->Allocate(Bytes(capacity * model->config.hidden, DType::kF32),
                                         MemoryKind::kGradients));
    rows->slot_of_row_.assign(
        static_cast<size_t>(RowsTouched(rows->table_, rows->owned_, model->config.hidden)), -1);
  }
  return rows;
}

absl::Status TokenRows::Allocate(Device* device) {
  const int64_t tokens = policy_.options.micro_batch * config_.sequence;
  const int64_t columns = config_.hidden;
  const auto buffers = [&](size_t bytes, Buffer* out) -> absl::Status {
    ZS_ASSIGN_OR_RETURN(*out, device->Allocate(bytes, MemoryKind::kBuffers));
    return absl::OkStatus();
  };
  ZS_RETURN_IF_ERROR(buffers(Bytes(tokens, DType::kI32), &ids_));
  ZS_RETURN_IF_ERROR(buffers(Bytes(tokens * columns, wire_), &rows_));
  if (!policy_.table_trained || policy_.gradient_mode == GradientMode::kFullAccumulate)
    return absl::OkStatus();
  ZS_RETURN_IF_ERROR(buffers(Bytes(3 * kPiece, DType::kF32), &piece_));
  if (policy_.sparse_rows) {
    const int64_t slots = policy_.row_slots * policy_.options.world;
    ZS_RETURN_IF_ERROR(buffers(Bytes(slots, DType::kI32), &all_ids_));
    return buffers(Bytes(slots * columns, wire_), &all_rows_);
  }
  if (policy_.tied) {
    const int64_t owned = Owned(unit_.layout, comm_->rank(), blocks_).size();
    ZS_ASSIGN_OR_RETURN(
        sums_, device->Allocate(Bytes(owned, policy_.accumulate_type), MemoryKind::kGradients));
  }
  return absl::OkStatus();
}

void TokenRows::BeginStep() {
  if (!policy_.table_trained) return;
  // Nothing else writes an untied table's gradient where rows travel sparsely or are added here.
  if (policy_.gradient_mode == GradientMode::kFullAccumulate) {
    if (!policy_.tied)
      ops_->Zero(unit_.Gradient(table_.begin), Bytes(table_.size(), unit_.gradient_type));
    return;
  }
  if (!policy_.sparse_rows) return;
  if (!policy_.tied && owned_.size() > 0)
    ops_->Zero(unit_.Gradient(owned_.begin), Bytes(owned_.size(), unit_.gradient_type));
  for (int32_t row : touched_) slot_of_row_[static_cast<size_t>(row - first_row_)] = -1;
  touched_.clear();
}

absl::Status TokenRows::Reduce(uint64_t step, int64_t round, int contributors) {
  if (!policy_.table_trained) return absl::OkStatus();
  if (policy_.gradient_mode == GradientMode::kFullAccumulate) {
    if (comm_->rank() < contributors) AccumulateLocally();
    return absl::OkStatus();
  }
  if (!policy_.sparse_rows) return ReduceDense(round);
  return GatherRows(step, contributors);
}

void TokenRows::AccumulateLocally() {
  for (int64_t i = 0; i < policy_.row_slots && ids()[i] >= 0; ++i) {
    const int64_t element = table_.begin + int64_t{ids()[i]} * config_.hidden;
    ops_->AccumulateF32(rows_.as<char>() + Bytes(i * config_.hidden, wire_), wire_, config_.hidden,
                        true, static_cast<float*>(unit_.Gradient(element)));
  }
}

absl::Status TokenRows::ReduceDense(int64_t round) {
  const size_t bytes = Bytes(blocks_.size(), wire_);
  Buffer apart;
  void* dense = nullptr;
  if (policy_.tied) {
    ZS_ASSIGN_OR_RETURN(apart, reducer_->TakeTransient(bytes));
    dense = apart.data();
  } else {
    ZS_ASSIGN_OR_RETURN(dense, reducer_->Sink(0)->Acquire(blocks_.begin, blocks_.end));
  }
  ops_->Zero(dense, bytes);
  for (int64_t i = 0; i < policy_.row_slots && ids()[i] >= 0; ++i) {
    ops_->Copy(static_cast<char*>(dense) + Bytes(int64_t{ids()[i]} * config_.hidden, wire_),
               rows_.as<char>() + Bytes(i * config_.hidden, wire_), Bytes(config_.hidden, wire_));
  }
  if (!policy_.tied) return reducer_->Sink(0)->Done(blocks_.begin, blocks_.end);
  return reducer_->ReduceApart(0, std::move(apart), blocks_, sums_.data());
}

absl::Status TokenRows::GatherRows(uint64_t step, int contributors) {
  ZS_RETURN_IF_ERROR(FoldGathered());
  const int64_t slots = policy_.row_slots;
  const int64_t row_elements = slots * config_.hidden;
  const int rank = comm_->rank();
  int32_t* own_ids = all_ids_.as<int32_t>() + rank * slots;
  ops_->Copy(own_ids, ids(), Bytes(slots, DType::kI32));
  ops_->Copy(all_rows_.as<char>() + Bytes(rank * row_elements, wire_), rows(),
             Bytes(row_elements, wire_));
  const CollectiveInfo info{.phase = Phase::kBackward, .unit = unit_.table->name, .step = step};
  gathered_ids_ = comm_->AllGather(all_ids_.data(), slots, DType::kI32, info);
  gathered_rows_ = comm_->AllGather(all_rows_.data(), row_elements, wire_, info);
  gathered_contributors_ = contributors;
  return policy_.options.overlap ? absl::OkStatus() : gathered_rows_.Wait();
}

absl::Status TokenRows::FoldGathered() {
  ZS_RETURN_IF_ERROR(gathered_ids_.Wait());
  ZS_RETURN_IF_ERROR(gathered_rows_.Wait());
  const int64_t slots = policy_.row_slots;
  const int contributors = std::exchange(gathered_contributors_, 0);
  for (int r = 0; r < contributors; ++r) {
    const int32_t* ids = all_ids_.as<int32_t>() + r * slots;
    for (int64_t i = 0; i < slots && ids[i] >= 0; ++i)
      FoldRow(ids[i], all_rows_.as<char>() + Bytes((r * slots + i) * config_.hidden, wire_));
  }
  return absl::OkStatus();
}

void TokenRows::FoldRow(int32_t id, const char* row) {
  const int64_t begin = table_.begin + int64_t{id} * config_.hidden;
  const int64_t from = std::max(begin, owned_.begin);
  const int64_t to = std::min(begin + config_.hidden, owned_.end);
  if (from >= to) return;
  int32_t& slot = slot_of_row_[static_cast<size_t>(id - first_row_)];
  if (slot < 0) {
    slot = static_cast<int32_t>(touched_.size());
    touched_.push_back(id);
    ops_->Zero(sums_.as<float>() + slot * config_.hidden, Bytes(config_.hidden, DType::kF32));
  }
  ops_->AccumulateF32(row + Bytes(from - begin, wire_), wire_, to - from, true,
                      sums_.as<float>() + slot * config_.hidden + (from - begin));
}

absl::Status TokenRows::Join() {
  if (!policy_.table_trained || policy_.gradient_mode == GradientMode::kFullAccumulate)
    return absl::OkStatus();
  if (!policy_.sparse_rows) {
    return policy_.tied ? JoinRange(owned_, sums_.data(), policy_.accumulate_type)
                        : absl::OkStatus();
  }
  ZS_RETURN_IF_ERROR(FoldGathered());
  for (size_t slot = 0; slot < touched_.size(); ++slot) {
    const int64_t begin = table_.begin + int64_t{touched_[slot]} * config_.hidden;
    const int64_t from = std::max(begin, owned_.begin);
    const int64_t to = std::min(begin + config_.hidden, owned_.end);
    const float* sum = sums_.as<float>() + static_cast<int64_t>(slot) * config_.hidden;
    ZS_RETURN_IF_ERROR(JoinRange({from, to}, sum + (from - begin), DType::kF32));
  }
  return absl::OkStatus();
}

// gradient = wire(gradient + wire(sum)); both gradients are in the wire type's values already.
absl::Status TokenRows::JoinRange(ElementRange range, const void* sum, DType sum_type) {
  char* rounded = piece_.as<char>();
  float* added = piece_.as<float>() + kPiece;
  for (int64_t at = range.begin; at < range.end; at += kPiece) {
    const int64_t n = std::min(kPiece, range.end - at);
    const char* from = static_cast<const char*>(sum) + Bytes(at - range.begin, sum_type);
    ops_->Convert(from, sum_type, n, rounded, wire_);
    ops_->AccumulateF32(unit_.Gradient(at), unit_.gradient_type, n, false, added);
    ops_->AccumulateF32(rounded, wire_, n, true, added);
    ops_->Convert(added, DType::kF32, n, rounded, wire_);
    ops_->Convert(rounded, wire_, n, unit_.Gradient(at), unit_.gradient_type);
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
