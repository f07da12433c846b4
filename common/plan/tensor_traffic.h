// What tensor parallelism sends (architecture, section 12; worker/model, "Tensor parallelism").
// Pure arithmetic; thread-safe.
#pragma once

#include "common/plan/collective_bytes.h"
#include "common/plan/model_table.h"

namespace zeroshard {

// A rank's place in its tensor group.
struct TensorShare {
  int rank = 0;
  int copies = 1;  // neighbours that hold the same key and value heads (tensor_slices.h)
};
TensorShare TensorShareOf(const ModelConfig& full, int tensor, int rank);

// What a tensor rank sends to the others of its group while one micro-batch of `micro_batch`
// sequences goes forward and backward through `unit` of its slice, of which `slice` is the
// configuration. Nothing where slice.tensor is 1. With n = mb*T*C elements:
//   block: two sums of n forward and two backward (Shoeybi et al. 2019, section 3), one more where
//     it is computed again, as its last sum is not; where ranks share key and value heads, the sums
//     of those gradients, of the matrices and of the biases.
//   embedding: one sum of n forward.
//   head: three numbers a token of each rank's softmax forward; backward a sum of T*C a sequence.
// As many bytes as a ring sends, but for sums of up to kDirectAllReduce elements.
//
// Where rows are divided (Korthikanti et al. 2022, section 4.2.2) a sum is a reduce-scatter of n
// and what reads all rows an all-gather, half the bytes of a sum each:
//   block: two of each forward; backward four gathers and two reduce-scatters, one more of each
//     where it is computed again, and the sums of its norms' gradients.
//   embedding: one reduce-scatter forward, one gather backward.
//   head: one gather forward, beside the softmax's; backward one reduce-scatter and its norm's sum.
TrafficTable TensorTraffic(const ModelConfig& slice, const UnitTable& unit,
                           const TensorShare& share, int64_t micro_batch, DType type,
                           bool checkpointing);

}  // namespace zeroshard
