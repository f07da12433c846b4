// What each unit keeps between its forward and its backward, and the scratch it needs while it
// runs. The model carves its buffers by these tables, and the planner adds them up, so that the two
// cannot disagree. Pure arithmetic; thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/plan/model_table.h"

namespace zeroshard {

struct ActivationInfo {
  std::string name;  // "attn.qkv"
  int64_t elements = 0;
  DType dtype = DType::kF32;
  int64_t offset = 0;  // bytes from the start of the unit's block; a multiple of 64
};

struct ActivationTable {
  std::vector<ActivationInfo> kept;     // live from forward to backward
  std::vector<ActivationInfo> scratch;  // live only inside one call; all units share one block
  int64_t kept_bytes = 0;               // a multiple of 64
  int64_t scratch_bytes = 0;            // likewise

  // nullptr when there is none of that name.
  const ActivationInfo* FindKept(absl::string_view name) const;
  const ActivationInfo* FindScratch(absl::string_view name) const;
};

// Rows that a rank has of what flows between units: mb*T, or where ModelConfig::DividesRows mb*T/t,
// of which tensor rank i has [i mb*T/t, (i+1) mb*T/t), counted through the micro-batch's sequences
// (Korthikanti et al. 2022, section 4.2.2). t divides T (TensorProblem).
int64_t StreamRows(const ModelConfig& config, int64_t micro_batch);

// `micro_batch` sequences of config.sequence tokens; activations in `dtype` (fp32, bf16 or fp16).
//
// The first kept entry of every block and of the head is "input" [StreamRows, C], at offset 0: the
// memory that the unit before writes its output to, so that a boundary between two units exists
// once. (A unit that is handed another `x` copies it there only when checkpointing.)
//
// Where rows are divided, what is kept of them, the residual between a block's halves and the
// norms' statistics are of a rank's own rows; what products read and write is of all rows.
//
// With checkpointing a block keeps only its input (`kept` then holds "input" alone and the rest
// moves to scratch).
ActivationTable MakeActivationTable(const ModelConfig& config, UnitKind kind, int64_t micro_batch,
                                    DType dtype, bool checkpointing);

// Inference over `rows` positions of one sequence: all that a unit needs is scratch, under the
// names of a training pass.
ActivationTable MakeDecodeTable(const ModelConfig& config, UnitKind kind, int64_t rows,
                                DType dtype);

// Bytes of all units' kept blocks, one shared scratch block (the largest) and the two
// [StreamRows, C] buffers that carry the gradient from unit to unit (each rounded up to 64 bytes).
// Sizes past the range of int64 saturate to its largest value.
int64_t ActivationBytes(const ModelConfig& config, int64_t micro_batch, DType dtype,
                        bool checkpointing);

}  // namespace zeroshard
