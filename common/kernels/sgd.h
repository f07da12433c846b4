// SGD with momentum as one plain function: PyTorch's SGD (torch.optim.SGD with dampening 0 and
// without nesterov), whose weight decay is coupled: it is part of the gradient. The momentum buffer
// of Polyak, "Some methods of speeding up the convergence of iteration methods", 1964, as Sutskever
// et al., ICML 2013, write it.
//
// Per element, in fp32, each line rounded once (fma: fused multiply-add):
//   g     = float(grad) * grad_scale
//   g     = fma(p, weight_decay, g)
//   b     = b * momentum + g        (the product rounded first)
//   p     = fma(-learning_rate, b, p)
//   param = p rounded to param_type, as common/rounding.h says
// A buffer of zeros is a first step: b = g, as in PyTorch. Only correctly rounded operations are
// used: the bits depend neither on the instruction set, nor on the alignment, the length, the
// range's position or the number of threads.
#pragma once

#include <cstdint>

#include "common/rounding.h"
#include "common/types.h"

namespace zeroshard {

struct SgdArgs {
  float learning_rate = 0;
  float momentum = 0;
  float weight_decay = 0;  // coupled; 0 for norms and biases
  float grad_scale = 1;    // multiplier on every gradient: clip factor / tokens
  Rounding rounding = {};  // of the parameters
};

}  // namespace zeroshard

namespace zeroshard::cpu {

// One step of n elements. grad of grad_type, param of param_type (fp32, bf16 or fp16 each); master
// and buffer (where AdamW keeps exp_avg) are fp32 and updated in place. param may be master itself
// where param_type is fp32; nothing else may overlap. A non-finite gradient makes its element
// non-finite: the caller decides to skip a step before it calls. Reentrant; `threads` OpenMP
// threads, at least 1.
void Sgd(const SgdArgs& args, int64_t n, const void* grad, DType grad_type, float* master,
         float* buffer, void* param, DType param_type, int threads);

}  // namespace zeroshard::cpu
