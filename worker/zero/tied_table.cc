#include "worker/zero/tied_table.h"

#include "common/status_macros.h"

namespace zeroshard {

TiedTable::TiedTable(const ZeroPolicy* policy, UnitState* embedding, ElementRange owned,
                     Communicator* line, int peer, Device* device, Ops* ops)
    : wire_(policy->options.dtype),
      unit_(*embedding),
      owned_(owned),
      line_(line),
      peer_(peer),
      compute_(device->compute()),
      ops_(ops) {}

TiedTable::~TiedTable() { exchanged_.Wait().IgnoreError(); }

absl::StatusOr<std::unique_ptr<TiedTable>> TiedTable::Create(const ZeroPolicy* policy,
                                                             UnitState* embedding,
                                                             ElementRange owned, Communicator* line,
                                                             int peer, Device* device, Ops* ops) {
  std::unique_ptr<TiedTable> table(
      new TiedTable(policy, embedding, owned, line, peer, device, ops));
  const size_t bytes = static_cast<size_t>(owned.size()) * SizeOf(table->wire_);
  ZS_ASSIGN_OR_RETURN(table->other_, device->Allocate(bytes, MemoryKind::kBuffers));
  if (embedding->gradient_type != table->wire_) {
    ZS_ASSIGN_OR_RETURN(table->own_, device->Allocate(bytes, MemoryKind::kBuffers));
  }
  return table;
}

absl::Status TiedTable::Join(uint64_t step) {
  if (owned_.size() == 0) return absl::OkStatus();
  void* const gradient = unit_.Gradient(owned_.begin);
  void* sent = gradient;
  if (own_.bytes() > 0) {
    sent = own_.data();
    ops_->Convert(gradient, unit_.gradient_type, owned_.size(), sent, wire_);
  }
  const int64_t bytes = owned_.size() * static_cast<int64_t>(SizeOf(wire_));
  exchanged_ = line_->Exchange(
      {{.send = true, .buffer = sent, .bytes = bytes, .peer = peer_, .phase = Phase::kStep},
       {.buffer = other_.data(), .bytes = bytes, .peer = peer_, .phase = Phase::kStep}},
      {.phase = Phase::kStep, .unit = "tied table", .step = step}, compute_->Record());
  ZS_RETURN_IF_ERROR(compute_->WaitFor(exchanged_));
  ops_->AddRounded(other_.data(), wire_, owned_.size(), wire_, gradient, unit_.gradient_type);
  return absl::OkStatus();
}

}  // namespace zeroshard
