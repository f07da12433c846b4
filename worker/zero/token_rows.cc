#include "worker/zero/token_rows.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "common/status_macros.h"

namespace zeroshard {
namespace {

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
      compute_(device->compute()),
      table_(TokenTable(*model)),
      blocks_(TokenTableBlocks(*model)),
      owned_(Owned(embedding->layout, comm->rank(), table_)),
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
  if (policy->sparse_rows && policy->table_trained)
    ZS_RETURN_IF_ERROR(rows->AllocateSums(RowCapacity(*model, *policy, comm->rank()), device));
  return rows;
}

absl::Status TokenRows::AllocateSums(int64_t capacity, Device* device) {
  const int64_t rows = RowsTouched(table_, owned_, config_.hidden);
  ZS_ASSIGN_OR_RETURN(sums_, device->Allocate(Bytes(capacity * config_.hidden, DType::kF32),
                                              MemoryKind::kGradients));
  ZS_ASSIGN_OR_RETURN(
      slots_, device->Allocate(Bytes(rows + capacity + 1, DType::kI32), MemoryKind::kBuffers));
  touched_ = {.begin = owned_.begin - table_.begin,
              .end = owned_.end - table_.begin,
              .cols = config_.hidden,
              .capacity = capacity,
              .slots = slots_.as<int32_t>(),
              .touched = slots_.as<int32_t>() + rows,
              .count = slots_.as<int32_t>() + rows + capacity,
              .sums = sums_.as<float>()};
  const std::vector<int32_t> none(static_cast<size_t>(rows), -1);
  return CopyAndWait(device, touched_.slots, none.data(), Bytes(rows, DType::kI32));
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
  ops_->ClearRows(touched_);
}

absl::Status TokenRows::Reduce(uint64_t step, int64_t round, int contributors) {
  if (!policy_.table_trained) return absl::OkStatus();
  if (policy_.gradient_mode == GradientMode::kFullAccumulate) {
    if (comm_->rank() < contributors) {
      ops_->AccumulateRows(ids(), rows(), policy_.row_slots, config_.hidden, wire_,
                           static_cast<float*>(unit_.Gradient(table_.begin)));
    }
    return absl::OkStatus();
  }
  if (!policy_.sparse_rows) return ReduceDense(round);
  return GatherRows(step, contributors);
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
  Waiting waiting(waits_, WaitKind::kRanks);  // for room the stores may have been waited for
  ops_->Zero(dense, bytes);
  ops_->ScatterRows(ids(), rows(), policy_.row_slots, config_.hidden, wire_, dense);
  if (!policy_.tied) return reducer_->Sink(0)->Done(blocks_.begin, blocks_.end);
  return reducer_->ReduceApart(0, std::move(apart), blocks_, sums_.data());
}

absl::Status TokenRows::GatherRows(uint64_t step, int contributors) {
  Waiting waiting(waits_, WaitKind::kRanks);
  ZS_RETURN_IF_ERROR(FoldGathered());
  const int64_t slots = policy_.row_slots;
  const int64_t row_elements = slots * config_.hidden;
  const int rank = comm_->rank();
  int32_t* own_ids = all_ids_.as<int32_t>() + rank * slots;
  ops_->Copy(own_ids, ids(), Bytes(slots, DType::kI32));
  ops_->Copy(all_rows_.as<char>() + Bytes(rank * row_elements, wire_), rows(),
             Bytes(row_elements, wire_));
  const CollectiveInfo info{.phase = Phase::kBackward, .unit = unit_.table->name, .step = step};
  const Event after = compute_->Record();
  gathered_ids_ = comm_->AllGather(all_ids_.data(), slots, DType::kI32, info, after);
  gathered_rows_ = comm_->AllGather(all_rows_.data(), row_elements, wire_, info, after);
  gathered_contributors_ = contributors;
  return policy_.options.overlap ? absl::OkStatus() : compute_->WaitFor(gathered_rows_);
}

absl::Status TokenRows::FoldGathered() {
  ZS_RETURN_IF_ERROR(compute_->WaitFor(gathered_ids_));
  ZS_RETURN_IF_ERROR(compute_->WaitFor(gathered_rows_));
  const int64_t slots = policy_.row_slots;
  const int contributors = std::exchange(gathered_contributors_, 0);
  if (owned_.size() == 0) return absl::OkStatus();
  for (int r = 0; r < contributors; ++r) {
    ops_->FoldRows(touched_, all_ids_.as<int32_t>() + r * slots,
                   all_rows_.as<char>() + Bytes(r * slots * config_.hidden, wire_), slots, wire_);
  }
  return absl::OkStatus();
}

absl::Status TokenRows::Join() {
  if (!policy_.table_trained || policy_.gradient_mode == GradientMode::kFullAccumulate)
    return absl::OkStatus();
  if (policy_.sparse_rows) ZS_RETURN_IF_ERROR(FoldGathered());
  if (owned_.size() == 0) return absl::OkStatus();
  void* gradient = unit_.Gradient(owned_.begin);
  if (policy_.sparse_rows) {
    ops_->JoinRows(touched_, wire_, gradient, unit_.gradient_type);
  } else if (policy_.tied) {
    ops_->AddRounded(sums_.data(), policy_.accumulate_type, owned_.size(), wire_, gradient,
                     unit_.gradient_type);
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
