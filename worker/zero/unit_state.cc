#include "worker/zero/unit_state.h"

#include <algorithm>

#include "common/kernels/convert.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

char* At(const Buffer& buffer, int64_t element, size_t size) {
  return static_cast<char*>(buffer.data()) + element * static_cast<int64_t>(size);
}

absl::Status AllocateGradients(const ZeroPolicy& policy, UnitState* unit, Device* device) {
  const size_t wire = SizeOf(policy.options.dtype);
  const auto allocate = [&](int64_t elements, size_t size, Buffer* out) -> absl::Status {
    ZS_ASSIGN_OR_RETURN(
        *out, device->Allocate(static_cast<size_t>(elements) * size, MemoryKind::kGradients));
    return absl::OkStatus();
  };
  switch (policy.gradient_mode) {
    case GradientMode::kShard:
      unit->gradient_type = policy.accumulate_type;
      unit->gradient_begin = unit->own_begin;
      ZS_RETURN_IF_ERROR(allocate(unit->owned(), SizeOf(unit->gradient_type), &unit->gradient));
      if (policy.options.stage == 0)
        ZS_RETURN_IF_ERROR(allocate(unit->layout.Padded(), wire, &unit->full_gradient));
      return absl::OkStatus();
    case GradientMode::kFullWire:
      unit->gradient_type = policy.options.dtype;
      return allocate(unit->layout.Padded(), wire, &unit->gradient);
    case GradientMode::kFullAccumulate:
      unit->gradient_type = DType::kF32;
      return allocate(unit->layout.Padded(), sizeof(float), &unit->gradient);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SetRange(UnitState* unit, int64_t begin, absl::Span<const float> values,
                      Device* device) {
  const int64_t end = begin + static_cast<int64_t>(values.size());
  const int64_t from = std::max(begin, unit->resident ? 0 : unit->own_begin);
  const int64_t to = std::min(end, unit->resident ? unit->layout.length : unit->own_end);
  if (from < to) {
    const float* held = values.data() + (from - begin);
    const size_t bytes = static_cast<size_t>(to - from) * SizeOf(unit->dtype);
    std::vector<char> rounded;
    const void* written = held;
    if (unit->dtype != DType::kF32) {
      rounded.resize(bytes);  // zeros where the slice has padding
      for (const SliceRun& run : unit->Runs({from, to})) {
        const int64_t at = run.local - from;
        cpu::RoundParameters(held + at, run.size, unit->rounding.From(run.flat),
                             rounded.data() + at * static_cast<int64_t>(SizeOf(unit->dtype)),
                             unit->dtype, 1);
      }
      written = rounded.data();
    }
    ZS_RETURN_IF_ERROR(CopyAndWait(device, unit->Parameter(from), written, bytes));
  }
  if (unit->master.data() == nullptr) return absl::OkStatus();
  const int64_t kept_from = std::max(begin, unit->state_begin);
  const int64_t kept_to = std::min(end, unit->state_end);
  if (kept_from >= kept_to) return absl::OkStatus();
  return CopyAndWait(device, unit->Master(kept_from), values.data() + (kept_from - begin),
                     static_cast<size_t>(kept_to - kept_from) * sizeof(float));
}

std::vector<SliceRun> UnitState::Runs(ElementRange range) const {
  if (slice != nullptr) return FullRuns(*slice, index, range);
  std::vector<SliceRun> runs;
  for (size_t i = 0; i < table->parameters.size(); ++i) {
    const ParameterInfo& tensor = table->parameters[i];
    const int64_t begin = std::max(range.begin, tensor.offset);
    const int64_t end = std::min(range.end, tensor.offset + tensor.size);
    if (begin >= end) continue;
    runs.push_back({.parameter = static_cast<int>(i),
                    .local = begin,
                    .element = begin - tensor.offset,
                    .size = end - begin,
                    .flat = begin,
                    .ends = end == tensor.offset + tensor.size});
  }
  return runs;
}

void* UnitState::Parameter(int64_t element) const {
  return At(parameters, element - (resident ? 0 : own_begin), SizeOf(dtype));
}

float* UnitState::Master(int64_t element) const {
  if (dtype == DType::kF32) return static_cast<float*>(Parameter(element));
  return master.as<float>() + (element - state_begin);
}

void* UnitState::Gradient(int64_t element) const {
  return At(gradient, element - gradient_begin, SizeOf(gradient_type));
}

absl::StatusOr<std::vector<UnitState>> MakeUnitStates(const ModelTable& model,
                                                      const ZeroPolicy& policy, int rank,
                                                      Device* device, const TensorRank* slice) {
  std::vector<UnitState> states(model.units.size());
  for (size_t u = 0; u < states.size(); ++u) {
    UnitState& s = states[u];
    s.table = &model.units[u];
    s.index = u;
    s.slice = slice;
    s.layout = policy.layouts[u];
    s.own_begin = s.layout.Begin(rank);
    s.own_end = s.layout.End(rank);
    s.state_begin = policy.StateBegin(static_cast<int>(u), rank);
    s.state_end = policy.StateEnd(static_cast<int>(u), rank);
    s.resident = policy.resident[u];
    s.trained = policy.trained[u];
    s.dtype = policy.options.dtype;
    if (s.trained) s.rounding = policy.options.rounding.At(static_cast<int>(u), 0);
    s.keeps_parameters = policy.KeepsParameters(static_cast<int>(u));
    const int64_t held = !s.keeps_parameters ? 0 : s.resident ? s.layout.Padded() : s.owned();
    ZS_ASSIGN_OR_RETURN(s.parameters, device->Allocate(static_cast<size_t>(held) * SizeOf(s.dtype),
                                                       MemoryKind::kParameters));
    if (!s.trained) continue;
    s.gradient_type = policy.accumulate_type;
    if (policy.KeepsGradient(static_cast<int>(u)))
      ZS_RETURN_IF_ERROR(AllocateGradients(policy, &s, device));
    if (!policy.options.offload_optimizer) {
      const size_t state = static_cast<size_t>(s.state_end - s.state_begin) * sizeof(float);
      if (s.dtype != DType::kF32) {
        ZS_ASSIGN_OR_RETURN(s.master, device->Allocate(state, MemoryKind::kOptimizer));
      }
      ZS_ASSIGN_OR_RETURN(s.exp_avg, device->Allocate(state, MemoryKind::kOptimizer));
      ZS_ASSIGN_OR_RETURN(s.exp_avg_sq, device->Allocate(state, MemoryKind::kOptimizer));
    }
  }
  return states;
}

}  // namespace zeroshard
