#include "common/plan/mesh.h"

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr int64_t kAlign = 64;  // elements, as the layout has it

UnitTable SliceUnit(const UnitTable& unit, int tensor) {
  UnitTable slice = unit;
  int64_t end = 0;
  for (ParameterInfo& p : slice.parameters) {
    if (p.split == TensorSplit::kOutermost && !p.shape.empty()) {
      const int64_t row = p.shape[0] == 0 ? 0 : p.size / p.shape[0];
      p.shape[0] = CeilDiv(p.shape[0], tensor);
      p.size = p.shape[0] * row;
    }
    p.offset = RoundUp(end, kAlign);
    end = p.offset + p.size;
  }
  slice.length = RoundUp(end, kAlign);
  return slice;
}

}  // namespace

std::string MeshProblem(const ModelTable& model, int tensor, int pipeline) {
  const ModelConfig& c = model.config;
  if (c.layers % pipeline != 0)
    return absl::StrCat(c.layers, " layers in ", pipeline, " pipeline stages");
  for (const auto& [seen, what] : {std::pair<int64_t, const char*>{c.heads, " heads"},
                                   {c.kv_heads, " key and value heads"},
                                   {c.intermediate, " columns of the MLP"}}) {
    if (seen % tensor != 0) return absl::StrCat(seen, what, " on ", tensor, " tensor ranks");
  }
  return "";
}

ModelTable SliceModel(const ModelTable& model, int tensor, int pipeline) {
  if (tensor == 1 && pipeline == 1) return model;
  ModelTable slice;
  slice.config = model.config;
  slice.config.layers /= pipeline;
  slice.config.heads /= tensor;
  slice.config.kv_heads /= tensor;
  slice.config.intermediate /= tensor;
  slice.config.vocab = CeilDiv(slice.config.vocab, tensor);
  const size_t blocks = static_cast<size_t>(slice.config.layers);
  for (size_t u = 0; u < model.units.size(); ++u) {
    if (u <= blocks || u + 1 == model.units.size())
      slice.units.push_back(SliceUnit(model.units[u], tensor));
  }
  return slice;
}

MeshTraffic TrafficOfMesh(const ModelConfig& sliced, int tensor, int pipeline, int64_t micro_batch,
                          uint64_t element, bool checkpointing) {
  const uint64_t boundary =
      static_cast<uint64_t>(micro_batch * sliced.sequence * sliced.hidden) * element;
  MeshTraffic traffic;
  if (tensor > 1) {
    const auto t = static_cast<uint64_t>(tensor);
    const uint64_t once = static_cast<uint64_t>(sliced.layers) * 2 * (2 * (t - 1) * boundary / t);
    traffic.all_reduce_forward = once;
    traffic.all_reduce_backward = checkpointing ? 2 * once : once;
  }
  if (pipeline > 1) traffic.send_forward = traffic.send_backward = boundary;
  return traffic;
}

}  // namespace zeroshard
