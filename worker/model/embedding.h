// Token (and, in gpt2, position) embeddings.
#pragma once

#include <memory>

#include "worker/model/tensor_part.h"
#include "worker/model/unit.h"

namespace zeroshard {

std::unique_ptr<EmbeddingUnit> MakeEmbedding(const ModelConfig& config, const UnitTable& unit,
                                             const TensorPart& part = {});

}  // namespace zeroshard
