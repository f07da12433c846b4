#include <algorithm>
#include <utility>

#include "worker/model/block.h"
#include "worker/model/embedding.h"
#include "worker/model/head.h"
#include "worker/model/unit.h"

namespace zeroshard {

int64_t DecodeScratchBytes(const ModelConfig& config, int64_t rows, DType dtype) {
  return std::max(MakeDecodeTable(config, UnitKind::kBlock, rows, dtype).scratch_bytes,
                  MakeDecodeTable(config, UnitKind::kHead, rows, dtype).scratch_bytes);
}

Model MakeModel(ModelTable table, bool checkpointing) {
  Model model;
  const ModelConfig& config = table.config;
  for (size_t u = 0; u < table.units.size(); ++u) {
    const UnitTable& unit = table.units[u];
    switch (unit.kind) {
      case UnitKind::kEmbedding:
        model.embedding = MakeEmbedding(config, unit);
        break;
      case UnitKind::kBlock:
        model.blocks.push_back(MakeBlock(config, unit, static_cast<int64_t>(u), checkpointing));
        break;
      case UnitKind::kHead: {
        const ParameterInfo& matrix =
            config.tied ? table.units.front().parameters.front() : *unit.Find("lm_head.weight");
        model.head = MakeHead(config, unit, matrix.trainable);
        break;
      }
    }
  }
  model.table = std::move(table);
  return model;
}

}  // namespace zeroshard
