#include "common/plan/activation_table.h"

#include <algorithm>
#include <utility>

#include "common/plan/saturating.h"

namespace zeroshard {
namespace {

// Lays entries one after the other, each at a multiple of the alignment.
class Block {
 public:
  Block(std::vector<ActivationInfo>* entries, int64_t* bytes) : entries_(entries), bytes_(bytes) {}
  void Place(std::string name, int64_t elements, DType dtype) {
    entries_->push_back({std::move(name), elements, dtype, *bytes_});
    *bytes_ = SaturatingAdd(*bytes_, AlignedBytes(elements, dtype));
  }

 private:
  std::vector<ActivationInfo>* entries_;
  int64_t* bytes_;
};

const ActivationInfo* Find(const std::vector<ActivationInfo>& entries, absl::string_view name) {
  for (const ActivationInfo& entry : entries) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

// Kept are what only another product could bring back (q, k, v, the attention's output, the
// residual between the two halves, the MLP's first products) and the norms' statistics. The norms'
// outputs and the MLP's activation are recomputed in backward: element-wise work on data that
// backward reads anyway costs no more than the traffic of writing and reading them.
void PlaceBlock(const ModelConfig& c, int64_t micro_batch, DType dtype, Block kept, Block scratch) {
  const int64_t rows = SaturatingProduct({micro_batch, c.sequence});
  const int64_t own = StreamRows(c, micro_batch);
  const int64_t qkv = (c.heads + 2 * c.kv_heads) * c.head_dim;
  const int64_t width = c.heads * c.head_dim;
  const bool layer_norm = c.architecture == Architecture::kGpt2;
  if (layer_norm) kept.Place("norm_1.mean", own, DType::kF32);
  kept.Place("norm_1.rstd", own, DType::kF32);
  kept.Place("attn.qkv", SaturatingProduct({rows, qkv}), dtype);
  kept.Place("attn.lse", SaturatingProduct({rows, c.heads}), DType::kF32);
  kept.Place("attn.out", SaturatingProduct({rows, width}), dtype);
  kept.Place("residual", SaturatingProduct({own, c.hidden}), dtype);
  if (layer_norm) kept.Place("norm_2.mean", own, DType::kF32);
  kept.Place("norm_2.rstd", own, DType::kF32);
  if (layer_norm) {
    kept.Place("mlp.fc", SaturatingProduct({rows, c.intermediate}), dtype);
  } else {
    kept.Place("mlp.gate", SaturatingProduct({rows, c.intermediate}), dtype);
    kept.Place("mlp.up", SaturatingProduct({rows, c.intermediate}), dtype);
  }
  // Packed: the three lie apart in the flat vector.
  if (c.qkv_bias) scratch.Place("attn.qkv.bias", qkv, dtype);
  // And the gradient of it; before that, the gradients of what dropout let through. Where rows are
  // divided, of all ranks' rows, and this rank's part of a product that is to be added.
  scratch.Place("norm.out", SaturatingProduct({rows, c.hidden}), dtype);
  scratch.Place("attn.d_out", SaturatingProduct({rows, width}), dtype);
  // The MLP's activation, then its gradient; the gradient of q, k and v when the MLP is done.
  scratch.Place("wide", SaturatingProduct({rows, std::max(c.intermediate, qkv)}), dtype);
  // Of a half's normalised input: on its way between ranks while products still read that input.
  // Where rows are divided, before that the gradient of the half's output, of all rows.
  if (c.tensor > 1) scratch.Place("d_in", SaturatingProduct({rows, c.hidden}), dtype);
}

// The rows of this rank's table that tokens have.
void PlaceLocalIds(const ModelConfig& c, int64_t rows, Block scratch) {
  if (c.tensor > 1) scratch.Place("ids", rows, DType::kI32);
}

// `own` of the `rows` are normalised here.
void PlaceHeadNorm(const ModelConfig& c, int64_t rows, int64_t own, DType dtype, Block scratch) {
  if (c.architecture == Architecture::kGpt2) scratch.Place("norm.mean", own, DType::kF32);
  scratch.Place("norm.rstd", own, DType::kF32);
  scratch.Place("norm.out", SaturatingProduct({rows, c.hidden}), dtype);  // then the gradient of it
}

void PlaceHead(const ModelConfig& c, int64_t micro_batch, DType dtype, Block scratch) {
  const int64_t rows = SaturatingProduct({micro_batch, c.sequence});
  PlaceHeadNorm(c, rows, StreamRows(c, micro_batch), dtype, scratch);
  // Of the norm's output; elsewhere it has the place of the gradient that leaves.
  if (c.DividesRows()) scratch.Place("d_in", SaturatingProduct({rows, c.hidden}), dtype);
  scratch.Place("logits", SaturatingProduct({c.vocab, c.sequence}),
                dtype);  // of one sequence, [V, T]
  scratch.Place("losses", c.sequence, DType::kF32);
  if (c.tensor > 1) {
    PlaceLocalIds(c, c.sequence, scratch);  // of targets
    scratch.Place("softmax", SaturatingProduct({c.tensor, 3, c.sequence}), DType::kF32);
  }
  // A micro-batch of one sequence needs no sum: its products are final.
  if (micro_batch > 1) {
    scratch.Place("lm_head.gradient", SaturatingProduct({c.vocab, c.hidden}), DType::kF32);
  }
}

}  // namespace

const ActivationInfo* ActivationTable::FindKept(absl::string_view name) const {
  return Find(kept, name);
}

const ActivationInfo* ActivationTable::FindScratch(absl::string_view name) const {
  return Find(scratch, name);
}

int64_t StreamRows(const ModelConfig& config, int64_t micro_batch) {
  return SaturatingProduct({micro_batch, config.sequence}) /
         (config.DividesRows() ? config.tensor : 1);
}

ActivationTable MakeActivationTable(const ModelConfig& config, UnitKind kind, int64_t micro_batch,
                                    DType dtype, bool checkpointing) {
  ActivationTable table;
  Block kept(&table.kept, &table.kept_bytes);
  Block scratch(&table.scratch, &table.scratch_bytes);
  if (kind == UnitKind::kEmbedding) {
    PlaceLocalIds(config, SaturatingProduct({micro_batch, config.sequence}), scratch);
    // All rows: a rank's part of the sum, and the gradient; else what dropout leaves of the
    // gradient. No larger than a block's "norm.out", so that it adds no byte to a job.
    if (config.DividesRows() || config.embd_pdrop > 0) {
      scratch.Place("rows", SaturatingProduct({micro_batch, config.sequence, config.hidden}),
                    dtype);
    }
    return table;
  }
  kept.Place("input", SaturatingProduct({StreamRows(config, micro_batch), config.hidden}), dtype);
  if (kind == UnitKind::kHead) {
    PlaceHead(config, micro_batch, dtype, scratch);
  } else {
    PlaceBlock(config, micro_batch, dtype, checkpointing ? scratch : kept, scratch);
  }
  return table;
}

ActivationTable MakeDecodeTable(const ModelConfig& config, UnitKind kind, int64_t rows,
                                DType dtype) {
  ActivationTable table;
  Block scratch(&table.scratch, &table.scratch_bytes);
  if (kind == UnitKind::kEmbedding) PlaceLocalIds(config, rows, scratch);
  if (kind == UnitKind::kHead) {
    PlaceHeadNorm(config, rows, rows, dtype, scratch);
    // Of all ranks, each [rows, vocab].
    if (config.tensor > 1)
      scratch.Place("logits", SaturatingProduct({config.tensor, rows, config.vocab}), DType::kF32);
  }
  if (kind == UnitKind::kBlock) {
    ModelConfig part = config;
    part.sequence = rows;
    part.sequence_parallel = false;
    PlaceBlock(part, 1, dtype, scratch, scratch);
  }
  return table;
}

int64_t ActivationBytes(const ModelConfig& config, int64_t micro_batch, DType dtype,
                        bool checkpointing) {
  int64_t kept = 0;
  int64_t scratch = 0;
  for (UnitKind kind : {UnitKind::kEmbedding, UnitKind::kBlock, UnitKind::kHead}) {
    const ActivationTable table =
        MakeActivationTable(config, kind, micro_batch, dtype, checkpointing);
    const int64_t count = kind == UnitKind::kBlock ? config.layers : 1;
    kept = SaturatingAdd(kept, SaturatingProduct({table.kept_bytes, count}));
    scratch = std::max(scratch, table.scratch_bytes);
  }
  const int64_t boundary =
      AlignedBytes(SaturatingProduct({StreamRows(config, micro_batch), config.hidden}), dtype);
  return SaturatingAdd(SaturatingAdd(kept, scratch), SaturatingProduct({boundary, 2}));
}

}  // namespace zeroshard
