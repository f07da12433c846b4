// What a unit of a tensor rank's slice knows beside its table (common/plan/tensor_slices.h).
#pragma once

#include <cstdint>

#include "worker/comm/tensor_group.h"

namespace zeroshard {

struct TensorPart {
  TensorGroup* group = nullptr;  // borrowed; null: the model is whole
  int64_t first_head = 0;        // of the queries
  // Rows of the vocabulary that are here; the table's rows behind them are padding.
  int64_t vocab_begin = 0, vocab_end = 0;
  int64_t full_vocab = 0;
};

}  // namespace zeroshard
