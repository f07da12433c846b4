// Self-attention of a block: one product for queries, keys and values, rotary positions (llama),
// causal attention, the output projection.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/model_table.h"
#include "worker/model/pass.h"

namespace zeroshard {

class SelfAttention {
 public:
  // `unit`: the block's table, the unit_index-th of the model; first_head: of the queries, of a
  // tensor rank.
  SelfAttention(const ModelConfig& config, const UnitTable& unit, int64_t unit_index,
                int64_t first_head);

  // out [own_rows, C] from in [rows, C]. In inference (pass.cache) its keys and values are added to
  // the cache, and the queries see all that is in it up to themselves.
  absl::Status Forward(const Pass& pass, const void* in, void* out) const;

  // The gradients in three parts, so that the first ranges can leave while the others are computed.
  // The output projection's, from d_out [rows, C]:
  absl::Status BackwardProjection(const Pass& pass, const void* d_out) const;
  // then those of q, k and v, into the scratch "wide", and their biases';
  absl::Status BackwardScores(const Pass& pass) const;
  // then their matrices' and d_in [rows, C], which may be `in` where the model is whole; of it the
  // own rows are right.
  absl::Status BackwardInput(const Pass& pass, const void* in, void* d_in) const;

  // Where the output projection starts in the unit's flat vector; q, k and v lie before it.
  int64_t projection_offset() const { return proj_.offset; }

 private:
  AttentionArgs Arguments(const Pass& pass) const;
  void Rotate(const Pass& pass, void* qkv, bool inverse) const;
  const void* PackedBias(const Pass& pass) const;
  void BiasGradients(const Pass& pass, const void* d_qkv) const;
  absl::Status MatrixGradients(const Pass& pass, const void* in) const;
  absl::Status InputGradient(const Pass& pass, void* d_in) const;
  absl::Status SumCopies(const Pass& pass) const;
  absl::Status Attend(const Pass& pass, void* out) const;
  absl::Status AttendCached(const Pass& pass, void* out) const;

  // q's, k's or v's columns of a packed [rows, qkv_width_] buffer.
  template <typename Pointer>
  Pointer Part(Pointer qkv, size_t part, DType dtype) const {
    return Advance(qkv, part == 0 ? 0 : width_ + (part == 2 ? kv_width_ : 0), dtype);
  }
  int64_t PartWidth(size_t part) const { return part == 0 ? width_ : kv_width_; }

  const ModelConfig config_;
  const int64_t width_;      // of all heads: H x D
  const int64_t kv_width_;   // KV x D
  const int64_t qkv_width_;  // (H + 2 KV) x D
  const int64_t first_head_;
  const uint32_t dropout_site_;
  const bool rotary_;
  const std::vector<float> frequencies_;
  const ParameterInfo q_, k_, v_;  // without a gap between them
  const bool qkv_trainable_;
  std::array<ParameterInfo, 3> qkv_biases_;  // with config.qkv_bias
  const ParameterInfo proj_;
  ParameterInfo proj_bias_;  // with config.proj_bias
};

}  // namespace zeroshard
