// Token (and, in gpt2, position) embeddings.
#pragma once

#include <memory>

#include "worker/model/unit.h"

namespace zeroshard {

std::unique_ptr<EmbeddingUnit> MakeEmbedding(const ModelConfig& config, const UnitTable& unit);

}  // namespace zeroshard
