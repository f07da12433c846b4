// What a unit of a tensor rank's slice knows beside its table (common/plan/tensor_slices.h).
#pragma once

#include <cstdint>

#include "common/plan/tensor_slices.h"
#include "worker/comm/tensor_group.h"

namespace zeroshard {

struct TensorPart {
  TensorGroup* group = nullptr;  // borrowed; null: the model is whole
  int64_t first_head = 0;        // of the queries
  // Rows of the vocabulary that are here; the table's rows behind them are padding.
  int64_t vocab_begin = 0, vocab_end = 0;
  int64_t full_vocab = 0;
};

// Of a rank's slice of the whole model.
inline TensorPart PartOf(const TensorRank& slice, TensorGroup* group) {
  if (slice.tensor == 1) return {};
  const TensorSlice& vocabulary = slice.slices.front().front();  // the token table's
  return {.group = group,
          .first_head = slice.rank * slice.model.config.heads,
          .vocab_begin = vocabulary.begin,
          .vocab_end = vocabulary.end,
          .full_vocab = slice.full_vocab};
}

}  // namespace zeroshard
