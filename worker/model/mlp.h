// The two-layer network of a block: GELU (gpt2) or SwiGLU (llama; Shazeer 2020).
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "common/plan/model_table.h"
#include "worker/model/pass.h"

namespace zeroshard {

class Mlp {
 public:
  virtual ~Mlp() = default;

  // The first products: what backward needs, from `in` [rows, C] into the unit's activations.
  virtual absl::Status Expand(const Pass& pass, const void* in) = 0;
  // out [own_rows, C], from what Expand left. Uses the scratch "wide".
  virtual absl::Status Contract(const Pass& pass, void* out) = 0;

  // The gradients of the parameters and d_in [rows, C] (not `in`), in two parts so that the first
  // range of gradients can leave while the second is computed. Overwrites what Expand left and
  // "wide".
  virtual absl::Status BackwardContract(const Pass& pass, const void* d_out) = 0;
  virtual absl::Status BackwardExpand(const Pass& pass, const void* in) = 0;
  // Before or after BackwardExpand; after it d_in may be `in`. Of a tensor rank: what its part of
  // the network adds to d_in.
  virtual absl::Status BackwardInput(const Pass& pass, void* d_in) = 0;

  // Where the parameters of Expand and of Contract start in the unit's flat vector; they follow
  // each other at its end.
  virtual int64_t expand_offset() const = 0;
  virtual int64_t contract_offset() const = 0;
};

std::unique_ptr<Mlp> MakeMlp(const ModelConfig& config, const UnitTable& unit);

}  // namespace zeroshard
