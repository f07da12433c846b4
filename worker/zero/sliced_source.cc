#include "worker/zero/sliced_source.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace zeroshard {

SlicedSource::SlicedSource(const ModelTable* full, const TensorRank* slice,
                           const ParameterSource* values)
    : full_(*full), slice_(*slice), values_(*values) {
  for (size_t u = 0; u < slice_.model.units.size(); ++u) {
    const auto& parameters = slice_.model.units[u].parameters;
    for (size_t i = 0; i < parameters.size(); ++i)
      places_[parameters[i].name] = {u, static_cast<int>(i)};
  }
}

absl::Status SlicedSource::Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                                float* out) const {
  const auto found = places_.find(tensor.name);
  if (found == places_.end() || begin < 0 || begin > end || end > tensor.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("elements [", begin, ", ", end, ") of tensor ", tensor.name, " with ",
                     tensor.size, " elements on tensor rank ", slice_.rank, " of ", slice_.tensor,
                     "; wanted a part of one of the slice's tensors"));
  }
  const auto [unit, parameter] = found->second;
  const size_t index = static_cast<size_t>(parameter);
  const ParameterInfo& local = slice_.model.units[unit].parameters[index];
  if (local.size != tensor.size) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor.name, " with ", tensor.size,
                                                   " elements; the slice of tensor rank ",
                                                   slice_.rank, " has ", local.size));
  }
  std::fill(out, out + (end - begin), 0.0f);
  for (const SliceRun& run : FullRuns(slice_, unit, {local.offset + begin, local.offset + end})) {
    const absl::Status status =
        values_.Read(full_.units[unit].parameters[index], run.element, run.element + run.size,
                     out + (run.local - local.offset - begin));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
