#include "common/plan/store_runs.h"

#include <algorithm>

namespace zeroshard {
namespace {

int64_t PaddingBehind(const UnitTable& unit, const ParameterInfo& tensor) {
  int64_t next = unit.length;
  for (const ParameterInfo& p : unit.parameters)
    if (p.offset > tensor.offset) next = std::min(next, p.offset);
  return next - (tensor.offset + tensor.size);
}

}  // namespace

std::vector<StoreRun> StoreRuns(const ModelTable& full, const TensorRank& slice, size_t unit,
                                ElementRange local) {
  std::vector<StoreRun> runs;
  const UnitTable& whole = full.units[unit];
  const std::vector<ParameterInfo>& parameters = slice.model.units[unit].parameters;
  for (const SliceRun& run : FullRuns(slice, unit, local)) {
    const ParameterInfo* tensor = whole.Find(parameters[static_cast<size_t>(run.parameter)].name);
    if (tensor == nullptr) continue;
    const bool last = run.element + run.size == tensor->size;
    runs.push_back({.local = run.local,
                    .full = tensor->offset + run.element,
                    .size = run.size,
                    .home = run.home,
                    .padding = last ? PaddingBehind(whole, *tensor) : 0});
  }
  return runs;
}

int64_t PushedElements(const std::vector<StoreRun>& runs) {
  int64_t elements = 0;
  for (const StoreRun& run : runs) elements += run.home ? run.size + run.padding : 0;
  return elements;
}

int64_t PulledElements(const std::vector<StoreRun>& runs) {
  int64_t elements = 0;
  for (const StoreRun& run : runs) elements += run.size;
  return elements;
}

}  // namespace zeroshard
