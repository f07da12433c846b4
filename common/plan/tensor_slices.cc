#include "common/plan/tensor_slices.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr int64_t kAlign = 64;  // elements, as the layout has it

bool IsKeyOrValue(const std::string& name) {
  return absl::StrContains(name, ".attn.k.") || absl::StrContains(name, ".attn.v.");
}

ModelConfig LocalConfig(const ModelConfig& full, int tensor) {
  ModelConfig local = full;
  local.heads /= tensor;
  local.kv_heads = std::max<int64_t>(1, full.kv_heads / tensor);
  local.intermediate /= tensor;
  local.vocab = CeilDiv(full.vocab, tensor);
  local.tensor = tensor;
  return local;
}

TensorSlice SliceOf(const ModelConfig& c, const ParameterInfo& p, int tensor, int rank) {
  const int64_t rows = p.shape.empty() ? 1 : p.shape[0];
  if (p.split == TensorSplit::kReplicated || p.shape.empty())
    return {.begin = 0, .end = rows, .copies = tensor, .home = 0, .rows = rows, .offset = p.offset};
  const int copies = IsKeyOrValue(p.name) ? KeyValueCopies(c, tensor) : 1;
  // All but the vocabulary's rows are divided without a rest.
  const int64_t each = CeilDiv(rows, tensor / copies);
  const int64_t part = rank / copies;
  return {.begin = std::min(part * each, rows),
          .end = std::min((part + 1) * each, rows),
          .copies = copies,
          .home = rank / copies * copies,
          .rows = rows,
          .offset = p.offset};
}

// The local shape, which is that of the first rank: no other has more rows.
void Place(const TensorSlice& first, int64_t* end, ParameterInfo* p) {
  if (!p->shape.empty()) {
    const int64_t row = p->shape[0] == 0 ? 0 : p->size / p->shape[0];
    p->shape[0] = first.end - first.begin;
    p->size = p->shape[0] * row;
  }
  p->offset = RoundUp(*end, kAlign);
  *end = p->offset + p->size;
}

}  // namespace

int KeyValueCopies(const ModelConfig& model, int tensor) {
  return static_cast<int>(std::max<int64_t>(1, tensor / model.kv_heads));
}

std::string TensorProblem(const ModelTable& model, int tensor) {
  const ModelConfig& c = model.config;
  const std::string on = absl::StrCat(" on ", tensor, " tensor ranks (parallel.tensor)");
  if (tensor < 1) return absl::StrCat("parallel.tensor: seen ", tensor, ", wanted at least 1");
  for (const auto& [seen, what] :
       {std::pair<int64_t, const char*>{c.heads, " heads (model.heads)"},
        {c.intermediate, " columns of the MLP (model.intermediate_size)"}}) {
    if (seen % tensor != 0)
      return absl::StrCat(seen, what, on, ": write a divisor of ", seen, " for parallel.tensor");
  }
  if (c.sequence_parallel && c.sequence % tensor != 0) {
    return absl::StrCat(c.sequence, " tokens (model.sequence_length)", on,
                        " that share each sequence (parallel.sequence_parallel): write a divisor "
                        "of ",
                        c.sequence, " for parallel.tensor, a multiple of ", tensor,
                        " for model.sequence_length, or sequence_parallel: false");
  }
  if (c.kv_heads % tensor != 0 && tensor % c.kv_heads != 0) {
    return absl::StrCat(c.kv_heads, " key and value heads (model.kv_heads)", on,
                        ": one must divide the other; write a divisor or a multiple of ",
                        c.kv_heads, " for parallel.tensor");
  }
  const ModelConfig local = LocalConfig(c, tensor);
  for (const auto& [heads, what] : {std::pair<int64_t, const char*>{local.heads, " heads of "},
                                    {local.kv_heads, " key and value heads of "}}) {
    if (tensor > 1 && heads * c.head_dim * c.hidden % kAlign != 0) {
      return absl::StrCat(heads, what, c.head_dim, " x ", c.hidden, " elements for each rank", on,
                          ", wanted a multiple of ", kAlign,
                          " elements: write a smaller parallel.tensor");
    }
  }
  return "";
}

TensorRank MakeTensorRank(const ModelTable& model, int tensor, int rank) {
  TensorRank result{.model = model,
                    .slices = {},
                    .tensor = tensor,
                    .rank = rank,
                    .full_vocab = model.config.vocab};
  result.model.config = LocalConfig(model.config, tensor);
  for (UnitTable& unit : result.model.units) {
    std::vector<TensorSlice>& slices = result.slices.emplace_back();
    int64_t end = 0;
    for (ParameterInfo& p : unit.parameters) {
      slices.push_back(SliceOf(model.config, p, tensor, rank));
      Place(SliceOf(model.config, p, tensor, 0), &end, &p);
    }
    unit.length = RoundUp(end, kAlign);
  }
  return result;
}

ParameterInfo FullParameter(const TensorRank& rank, size_t unit, size_t parameter) {
  ParameterInfo full = rank.model.units[unit].parameters[parameter];
  const TensorSlice& slice = rank.slices[unit][parameter];
  full.offset = slice.offset;
  if (full.shape.empty() || full.shape[0] == 0) return full;
  full.size = full.size / full.shape[0] * slice.rows;
  full.shape[0] = slice.rows;
  return full;
}

std::vector<SliceRun> FullRuns(const TensorRank& rank, size_t unit, ElementRange local) {
  std::vector<SliceRun> runs;
  const std::vector<ParameterInfo>& parameters = rank.model.units[unit].parameters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterInfo& p = parameters[i];
    const TensorSlice& slice = rank.slices[unit][i];
    const int64_t row = p.shape.empty() ? 1 : p.shape[0] == 0 ? 0 : p.size / p.shape[0];
    const int64_t begin = std::max(local.begin, p.offset);
    const int64_t end = std::min(local.end, p.offset + (slice.end - slice.begin) * row);
    if (begin >= end) continue;
    const int64_t element = slice.begin * row + begin - p.offset;
    runs.push_back({.parameter = static_cast<int>(i),
                    .local = begin,
                    .element = element,
                    .size = end - begin,
                    .home = rank.IsHome(unit, i),
                    .flat = slice.offset + element,
                    .ends = element + end - begin == slice.rows * row});
  }
  return runs;
}

int64_t PaddingBehind(const SliceRun& run) {
  const int64_t end = run.flat + run.size;
  return run.ends ? RoundUp(end, kAlign) - end : 0;
}

int64_t PushedElements(const std::vector<SliceRun>& runs) {
  int64_t elements = 0;
  for (const SliceRun& run : runs) elements += run.home ? run.size + PaddingBehind(run) : 0;
  return elements;
}

int64_t PulledElements(const std::vector<SliceRun>& runs) {
  int64_t elements = 0;
  for (const SliceRun& run : runs) elements += run.size;
  return elements;
}

}  // namespace zeroshard
