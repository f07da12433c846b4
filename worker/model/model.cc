#include <utility>

#include "worker/model/block.h"
#include "worker/model/embedding.h"
#include "worker/model/head.h"
#include "worker/model/unit.h"

namespace zeroshard {

Model MakeModel(ModelTable table, bool checkpointing) {
  Model model;
  const ModelConfig& config = table.config;
  for (const UnitTable& unit : table.units) {
    switch (unit.kind) {
      case UnitKind::kEmbedding:
        model.embedding = MakeEmbedding(config, unit);
        break;
      case UnitKind::kBlock:
        model.blocks.push_back(MakeBlock(config, unit, checkpointing));
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
