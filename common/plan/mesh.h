// A model cut for tensor and pipeline parallelism (architecture, section 12), so that what plans
// data-parallel ranks plans the ranks of a mesh too. Pure arithmetic; thread-safe.
#pragma once

#include <string>

#include "common/plan/model_table.h"

namespace zeroshard {

// Why the model cannot be cut like that, as TensorProblem and CutStages say it; empty: it can.
std::string MeshProblem(const ModelTable& model, int tensor, int pipeline);

// What one rank of `tensor` x `pipeline` has to do with, as a model of its own: its slice of each
// tensor (tensor_slices.h) and as many blocks as the stage with most of them has, where stages are
// cut by UnitCosts. Embedding and head are both in it, although a pipeline's first stage has the
// one and its last the other: an upper bound for all of them, which for deep models is close.
// MeshProblem must be empty.
ModelTable SliceModel(const ModelTable& model, int tensor, int pipeline, bool checkpointing);

// How long the busiest rank of a pipeline with v = 1 stands idle in a step of `micro_batches` a
// rank, as a share of the time it computes; (p - 1) / m where all stages cost the same.
// MeshProblem must be empty.
double IdleShare(const ModelConfig& config, int pipeline, bool checkpointing,
                 int64_t micro_batches);

// Bytes that a rank sends for one micro-batch of `micro_batch` sequences, `element` bytes each,
// beside what ZeRO's data dimension sends.
//   tensor: two all-reduces of [mb*T, C] a block forward and two backward (Shoeybi et al. 2019,
//     section 3), one more where the block is computed again, as its last sum is not; as a ring,
//     2 (t-1)/t of the bytes.
//   pipeline: one [mb*T, C] to the next stage forward and one back.
struct MeshTraffic {
  uint64_t all_reduce_forward = 0, all_reduce_backward = 0;
  uint64_t send_forward = 0, send_backward = 0;
};
MeshTraffic TrafficOfMesh(const ModelConfig& sliced, int tensor, int pipeline, int64_t micro_batch,
                          uint64_t element, bool checkpointing);

}  // namespace zeroshard
