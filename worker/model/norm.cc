#include "worker/model/norm.h"

namespace zeroshard {

Norm::Norm(const ModelConfig& config, const UnitTable& unit, const std::string& tensor,
           const std::string& name)
    : layer_norm_(config.architecture == Architecture::kGpt2),
      cols_(config.hidden),
      epsilon_(config.norm_epsilon),
      weight_(*unit.Find(tensor + ".weight")),
      mean_name_(name + ".mean"),
      rstd_name_(name + ".rstd") {
  if (layer_norm_) bias_ = *unit.Find(tensor + ".bias");
}

void Norm::Forward(const Pass& pass, const void* x, void* y) const {
  if (layer_norm_) {
    pass.ops().LayerNormForward(x, pass.Parameter(weight_), pass.Parameter(bias_), pass.own_rows,
                                cols_, epsilon_, pass.dtype(), y, pass.Float(mean_name_),
                                pass.Float(rstd_name_));
  } else {
    pass.ops().RmsNormForward(x, pass.Parameter(weight_), pass.own_rows, cols_, epsilon_,
                              pass.dtype(), y, pass.Float(rstd_name_));
  }
}

void Norm::Backward(const Pass& pass, const void* dy, const void* x, bool accumulate,
                    void* dx) const {
  if (layer_norm_) {
    pass.ops().LayerNormBackward(dy, x, pass.Parameter(weight_), pass.Float(mean_name_),
                                 pass.Float(rstd_name_), pass.own_rows, cols_, pass.dtype(),
                                 accumulate, dx, pass.Gradient(weight_), pass.Gradient(bias_));
  } else {
    pass.ops().RmsNormBackward(dy, x, pass.Parameter(weight_), pass.Float(rstd_name_),
                               pass.own_rows, cols_, pass.dtype(), accumulate, dx,
                               pass.Gradient(weight_));
  }
}

// Between the two lies padding at most.
Event Norm::BeginSum(const Pass& pass) const {
  const ParameterInfo& last = layer_norm_ ? bias_ : weight_;
  if (!pass.divided() || !(weight_.trainable || last.trainable)) return {};
  return pass.group->BeginSum(pass.Gradient(weight_), last.offset + last.size - weight_.offset,
                              pass.dtype(), pass.info);
}

int64_t Norm::end() const {
  const ParameterInfo& last = layer_norm_ ? bias_ : weight_;
  return RoundUp(last.offset + last.size, 64);
}

}  // namespace zeroshard
