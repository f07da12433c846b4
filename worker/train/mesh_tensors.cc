#include "worker/train/mesh_tensors.h"

#include <algorithm>

#include "common/status_macros.h"

namespace zeroshard {
namespace {

// What the slice has of a tensor. SliceRun::local is from the start of the unit.
std::vector<SliceRun> RunsOf(const TensorRank& slice, const TensorPlace& place) {
  const ParameterInfo& local = place.In(slice.model);
  return FullRuns(slice, place.unit, {local.offset, local.offset + local.size});
}

}  // namespace

std::optional<TensorPlace> FindTensor(const ModelTable& model, const std::string& name) {
  for (size_t u = 0; u < model.units.size(); ++u) {
    const std::vector<ParameterInfo>& parameters = model.units[u].parameters;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (parameters[i].name == name) return TensorPlace{u, i};
  }
  return std::nullopt;
}

absl::StatusOr<std::vector<float>> JoinSlices(const ModelTable& full, const TensorPlace& place,
                                              absl::Span<const float> own, Communicator* line,
                                              uint64_t step) {
  const auto size = static_cast<int64_t>(own.size());  // padded alike on all ranks
  std::vector<float> parts(static_cast<size_t>(size * line->size()));
  std::copy(own.begin(), own.end(), parts.begin() + line->rank() * size);
  const ParameterInfo& whole = place.In(full);
  ZS_RETURN_IF_ERROR(line->AllGatherHost(parts.data(), size * static_cast<int64_t>(sizeof(float)),
                                         {.unit = whole.name, .step = step}));
  std::vector<float> values(static_cast<size_t>(whole.size));
  for (int rank = 0; rank < line->size(); ++rank) {
    const TensorRank slice = MakeTensorRank(full, line->size(), rank);
    const int64_t begin = place.In(slice.model).offset;
    for (const SliceRun& run : RunsOf(slice, place)) {
      if (!run.home) continue;  // a copy
      std::copy_n(parts.begin() + rank * size + run.local - begin, run.size,
                  values.begin() + run.element);
    }
  }
  return values;
}

}  // namespace zeroshard
