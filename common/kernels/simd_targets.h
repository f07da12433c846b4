// The instruction sets the vector kernels are compiled for; include it before any Highway header.
// On x86: AVX-512, AVX2 and the plain C++ fallback. SSE4 has no fused multiply-add, so it would
// only be another emulation; scalable vectors (SVE, RVV) cannot be kept in arrays, and NEON serves
// there.
#pragma once

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
