#include "worker/model/mlp.h"

namespace zeroshard {
namespace {

class GeluMlp : public Mlp {
 public:
  GeluMlp(const ModelConfig& config, const UnitTable& unit)
      : hidden_(config.hidden),
        inner_(config.intermediate),
        fc_(*unit.Find("mlp.fc.weight")),
        fc_bias_(*unit.Find("mlp.fc.bias")),
        proj_(*unit.Find("mlp.proj.weight")),
        proj_bias_(*unit.Find("mlp.proj.bias")) {}

  absl::Status Expand(const Pass& pass, const void* in) override {
    return pass.Product(in, false, pass.Parameter(fc_), true, pass.At("mlp.fc"), pass.rows, inner_,
                        hidden_, pass.Parameter(fc_bias_));
  }

  absl::Status Contract(const Pass& pass, void* out) override {
    return pass.RowSplitProduct(Activation(pass), pass.Parameter(proj_), out, hidden_, inner_,
                                pass.Parameter(proj_bias_));
  }

  absl::Status BackwardContract(const Pass& pass, const void* d_out) override {
    pass.BiasGradient(proj_bias_, d_out);
    const absl::Status status =
        pass.MatrixGradient(proj_, Activation(pass), d_out, inner_, hidden_);
    if (!status.ok()) return status;
    return pass.ProductGeluBackward(d_out, pass.Parameter(proj_), pass.At("mlp.fc"),
                                    pass.At("wide"), pass.rows, inner_, hidden_);
  }

  absl::Status BackwardExpand(const Pass& pass, const void* in) override {
    pass.BiasGradient(fc_bias_, pass.At("wide"));
    return pass.MatrixGradient(fc_, pass.At("wide"), in, inner_, hidden_);
  }

  absl::Status BackwardInput(const Pass& pass, void* d_in) override {
    return pass.Product(pass.At("wide"), false, pass.Parameter(fc_), false, d_in, pass.rows,
                        hidden_, inner_);
  }

  int64_t expand_offset() const override { return fc_.offset; }
  int64_t contract_offset() const override { return proj_.offset; }

 private:
  const void* Activation(const Pass& pass) const {
    void* wide = pass.At("wide");
    pass.ops().GeluForward(pass.At("mlp.fc"), pass.rows * inner_, pass.dtype(), wide);
    return wide;
  }

  const int64_t hidden_;
  const int64_t inner_;
  const ParameterInfo fc_;
  const ParameterInfo fc_bias_;
  const ParameterInfo proj_;
  const ParameterInfo proj_bias_;
};

class SwiGluMlp : public Mlp {
 public:
  SwiGluMlp(const ModelConfig& config, const UnitTable& unit)
      : hidden_(config.hidden),
        inner_(config.intermediate),
        gate_(*unit.Find("mlp.gate.weight")),
        up_(*unit.Find("mlp.up.weight")),
        down_(*unit.Find("mlp.down.weight")),
        biased_(config.mlp_bias) {
    if (!biased_) return;
    gate_bias_ = *unit.Find("mlp.gate.bias");
    up_bias_ = *unit.Find("mlp.up.bias");
    down_bias_ = *unit.Find("mlp.down.bias");
  }

  absl::Status Expand(const Pass& pass, const void* in) override {
    const absl::Status status =
        pass.Product(in, false, pass.Parameter(gate_), true, pass.At("mlp.gate"), pass.rows, inner_,
                     hidden_, Bias(pass, gate_bias_));
    if (!status.ok()) return status;
    return pass.Product(in, false, pass.Parameter(up_), true, pass.At("mlp.up"), pass.rows, inner_,
                        hidden_, Bias(pass, up_bias_));
  }

  absl::Status Contract(const Pass& pass, void* out) override {
    return pass.RowSplitProduct(Activation(pass), pass.Parameter(down_), out, hidden_, inner_,
                                Bias(pass, down_bias_));
  }

  absl::Status BackwardContract(const Pass& pass, const void* d_out) override {
    if (biased_) pass.BiasGradient(down_bias_, d_out);
    absl::Status status = pass.MatrixGradient(down_, Activation(pass), d_out, inner_, hidden_);
    if (!status.ok()) return status;
    void* wide = pass.At("wide");
    status =
        pass.Product(d_out, false, pass.Parameter(down_), true, wide, pass.rows, inner_, hidden_);
    if (!status.ok()) return status;
    void* gate = pass.At("mlp.gate");
    void* up = pass.At("mlp.up");
    pass.ops().SwiGluBackward(wide, gate, up, pass.rows * inner_, pass.dtype(), gate, up);
    return absl::OkStatus();
  }

  absl::Status BackwardExpand(const Pass& pass, const void* in) override {
    if (biased_) {
      pass.BiasGradient(gate_bias_, pass.At("mlp.gate"));
      pass.BiasGradient(up_bias_, pass.At("mlp.up"));
    }
    const absl::Status status =
        pass.MatrixGradient(gate_, pass.At("mlp.gate"), in, inner_, hidden_);
    if (!status.ok()) return status;
    return pass.MatrixGradient(up_, pass.At("mlp.up"), in, inner_, hidden_);
  }

  absl::Status BackwardInput(const Pass& pass, void* d_in) override {
    const absl::Status status = pass.Product(pass.At("mlp.gate"), false, pass.Parameter(gate_),
                                             false, d_in, pass.rows, hidden_, inner_);
    if (!status.ok()) return status;
    return pass.Product(pass.At("mlp.up"), false, pass.Parameter(up_), false, d_in, pass.rows,
                        hidden_, inner_, nullptr, /*accumulate=*/true);
  }

  int64_t expand_offset() const override { return gate_.offset; }
  int64_t contract_offset() const override { return down_.offset; }

 private:
  const void* Bias(const Pass& pass, const ParameterInfo& p) const {
    return biased_ ? pass.Parameter(p) : nullptr;
  }

  const void* Activation(const Pass& pass) const {
    void* wide = pass.At("wide");
    pass.ops().SwiGluForward(pass.At("mlp.gate"), pass.At("mlp.up"), pass.rows * inner_,
                             pass.dtype(), wide);
    return wide;
  }

  const int64_t hidden_;
  const int64_t inner_;
  const ParameterInfo gate_;
  const ParameterInfo up_;
  const ParameterInfo down_;
  const bool biased_;
  ParameterInfo gate_bias_, up_bias_, down_bias_;  // where biased
};

}  // namespace

std::unique_ptr<Mlp> MakeMlp(const ModelConfig& config, const UnitTable& unit) {
  if (config.architecture == Architecture::kGpt2) return std::make_unique<GeluMlp>(config, unit);
  return std::make_unique<SwiGluMlp>(config, unit);
}

}  // namespace zeroshard
