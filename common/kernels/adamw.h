// AdamW as one plain function: the worker's optimizer and the shard stores run this same code, so a
// parameter gets the same bits wherever it is updated.
//
// Sources: Kingma & Ba, "Adam", ICLR 2015, algorithm 1; Loshchilov & Hutter, "Decoupled Weight
// Decay Regularization", ICLR 2019, algorithm 2 (with the schedule multiplier inside learning_rate,
// so the decay is learning_rate * weight_decay, as in PyTorch).
//
// Per call, in fp64, each rounded once to fp32:
//   decay      = 1 - learning_rate * weight_decay
//   rest1      = 1 - beta1
//   rest2      = 1 - beta2
//   step_size  = learning_rate / (1 - beta1^t)
//   correction = 1 / sqrt(1 - beta2^t)          (powers by squaring, the exponent's low bit first)
// Per element, in fp32, each line rounded once (fma: fused multiply-add):
//   g     = float(grad) * grad_scale
//   m     = fma(g, rest1, m * beta1)            (m * beta1 rounded first)
//   v     = fma(g * g, rest2, v * beta2)        (g * g and v * beta2 rounded first)
//   denom = fma(sqrt(v), correction, eps)       (sqrt rounded first)
//   p     = fma(-step_size, m / denom, p * decay)   (m / denom and p * decay rounded first)
//   param = p rounded to param_type, as common/rounding.h says
// Only correctly rounded operations are used: the bits depend neither on the instruction set, nor
// on the alignment, the length, the range's position or the number of threads.
#pragma once

#include <cstdint>

#include "common/rounding.h"
#include "common/types.h"

namespace zeroshard {

struct AdamWArgs {
  float learning_rate = 0;
  float beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f;
  float weight_decay = 0;  // decoupled; 0 for norms and biases
  float grad_scale = 1;    // multiplier on every gradient: clip factor / tokens
  int64_t t = 1;           // Adam's step count, from 1
  Rounding rounding = {};  // of the parameters
};

// The numbers of a call, as above; the same on every device.
struct AdamWFactors {
  float grad_scale, beta1, rest1, beta2, rest2, eps, decay, step_size, correction;
};
AdamWFactors AdamWFactorsOf(const AdamWArgs& args);

}  // namespace zeroshard

namespace zeroshard::cpu {

// One step of n elements. grad of grad_type, param of param_type (fp32, bf16 or fp16 each); master,
// exp_avg and exp_avg_sq are fp32 and updated in place. param may be master itself where param_type
// is fp32; nothing else may overlap. args.t counts from 1. A non-finite gradient makes its element
// non-finite: the caller decides to skip a step before it calls. Reentrant; `threads` OpenMP
// threads, at least 1.
void AdamW(const AdamWArgs& args, int64_t n, const void* grad, DType grad_type, float* master,
           float* exp_avg, float* exp_avg_sq, void* param, DType param_type, int threads);

}  // namespace zeroshard::cpu
