// The normalisation in front of attention, MLP and head.
#pragma once

#include <cstdint>
#include <string>

#include "common/plan/model_table.h"
#include "worker/model/pass.h"

namespace zeroshard {

// LayerNorm (Ba et al. 2016) for gpt2, RMSNorm (Zhang & Sennrich 2019) for llama. Its statistics
// lie in the activations `name`.mean (LayerNorm only) and `name`.rstd [rows] fp32.
class Norm {
 public:
  // `tensor`: the prefix of its parameters in the unit, "ln_1".
  Norm(const ModelConfig& config, const UnitTable& unit, const std::string& tensor,
       const std::string& name);

  // x, y [own_rows, C]; the gradients are own rows' part where rows are divided.
  void Forward(const Pass& pass, const void* x, void* y) const;
  // Adds to dx where accumulate; writes the parameters' gradients. dx may be dy only where it does
  // not accumulate.
  void Backward(const Pass& pass, const void* dy, const void* x, bool accumulate, void* dx) const;

  // Where rows are divided: the gradients that Backward wrote become their sums over the tensor
  // ranks; done once Pass::Wait is. Elsewhere, and of a frozen norm, nothing.
  Event BeginSum(const Pass& pass) const;

  // Elements [0, end) of the unit's flat vector when the norm comes first in it.
  int64_t end() const;

 private:
  bool layer_norm_;
  int64_t cols_;
  float epsilon_;
  ParameterInfo weight_;
  ParameterInfo bias_;  // LayerNorm only
  std::string mean_name_;
  std::string rstd_name_;
};

}  // namespace zeroshard
