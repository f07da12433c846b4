// What the processor offers, as oneDNN sees it: the environment variable DNNL_MAX_CPU_ISA caps both
// oneDNN and the vector loops, so that one machine can stand for a smaller one.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace zeroshard::cpu {

// FAILED_PRECONDITION where AVX2 with FMA is missing or capped away: without real fused
// multiply-adds the numbers would not be those of other machines. Thread-safe.
absl::Status CpuIsSupported();

// Keeps the vector loops within DNNL_MAX_CPU_ISA. The first call decides for the process; call it
// before the first kernel (MakeCpuOps does). Thread-safe.
void ApplyIsaCap();

// bf16 products are native (AVX512_BF16); elsewhere operands are widened to fp32.
bool HasNativeBf16();
// oneDNN has its fast products for dense operands (AVX-512).
bool HasBrgemm();

// "avx512_core_bf16, onednn 2.6.3, highway AVX3": what decides the bits of a result.
std::string Fingerprint();

}  // namespace zeroshard::cpu
