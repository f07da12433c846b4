#include <algorithm>
#include <utility>

#include "worker/model/block.h"
#include "worker/model/embedding.h"
#include "worker/model/head.h"
#include "worker/model/unit.h"

namespace zeroshard {

int64_t DecodeScratchBytes(const ModelConfig& config, int64_t rows, DType dtype) {
  int64_t bytes = 0;
  for (const UnitKind kind : {UnitKind::kEmbedding, UnitKind::kBlock, UnitKind::kHead})
    bytes = std::max(bytes, MakeDecodeTable(config, kind, rows, dtype).scratch_bytes);
  return bytes;
}

namespace {

Model MakeUnits(ModelTable table, bool checkpointing, const TensorPart& part) {
  Model model;
  const ModelConfig& config = table.config;
  for (size_t u = 0; u < table.units.size(); ++u) {
    const UnitTable& unit = table.units[u];
    switch (unit.kind) {
      case UnitKind::kEmbedding:
        model.embedding = MakeEmbedding(config, unit, part);
        break;
      case UnitKind::kBlock:
        model.blocks.push_back(
            MakeBlock(config, unit, static_cast<int64_t>(u), checkpointing, part));
        break;
      case UnitKind::kHead: {
        const ParameterInfo& matrix =
            config.tied ? table.units.front().parameters.front() : *unit.Find("lm_head.weight");
        model.head = MakeHead(config, unit, matrix.trainable, part);
        break;
      }
    }
  }
  model.table = std::move(table);
  return model;
}

}  // namespace

Model MakeModel(ModelTable table, bool checkpointing) {
  return MakeUnits(std::move(table), checkpointing, {});
}

Model MakeModel(const TensorRank& slice, bool checkpointing, TensorGroup* group) {
  return MakeUnits(slice.model, checkpointing, PartOf(slice, group));
}

}  // namespace zeroshard
