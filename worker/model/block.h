// A transformer block: x + attention(norm_1(x)), then + mlp(norm_2(.)).
#pragma once

#include <cstdint>
#include <memory>

#include "worker/model/tensor_part.h"
#include "worker/model/unit.h"

namespace zeroshard {

// `unit`: the block's table, the unit_index-th of the model. Backward acquires the whole unit and
// hands ranges out as they are finished: the MLP's second matrix, its first, the attention's output
// projection with norm 2, and the rest.
std::unique_ptr<BlockUnit> MakeBlock(const ModelConfig& config, const UnitTable& unit,
                                     int64_t unit_index, bool checkpointing,
                                     const TensorPart& part = {});

}  // namespace zeroshard
