#include "shard_store/state/optimizer.h"

#include "common/kernels/adamw.h"
#include "common/kernels/sgd.h"
#include "common/plan/offload.h"
#include "common/spec/decision.h"

namespace zeroshard::store {
namespace {

class AdamWStep : public OptimizerStep {
 public:
  explicit AdamWStep(const AdamWArgs& args) : decayed_(args), plain_(args) {
    plain_.weight_decay = 0;
  }
  void Update(const UpdateRange& range) const override {
    AdamWArgs args = range.decay ? decayed_ : plain_;
    args.rounding = args.rounding.At(range.unit, range.first);
    cpu::AdamW(args, range.size, range.gradient, range.gradient_type, range.master, range.exp_avg,
               range.exp_avg_sq, range.parameters, range.parameter_type, 1);
  }

 private:
  AdamWArgs decayed_, plain_;
};

class SgdStep : public OptimizerStep {
 public:
  explicit SgdStep(const SgdArgs& args) : decayed_(args), plain_(args) { plain_.weight_decay = 0; }
  void Update(const UpdateRange& range) const override {
    SgdArgs args = range.decay ? decayed_ : plain_;
    args.rounding = args.rounding.At(range.unit, range.first);
    cpu::Sgd(args, range.size, range.gradient, range.gradient_type, range.master, range.exp_avg,
             range.parameters, range.parameter_type, 1);
  }

 private:
  SgdArgs decayed_, plain_;
};

}  // namespace

std::unique_ptr<const OptimizerStep> MakeOptimizerStep(const v1::JobSpec& spec,
                                                       const v1::StepDecision& decision) {
  if (UsesSgd(spec)) return std::make_unique<SgdStep>(MakeSgdArgs(spec, decision));
  return std::make_unique<AdamWStep>(MakeAdamWArgs(spec, decision));
}

}  // namespace zeroshard::store
