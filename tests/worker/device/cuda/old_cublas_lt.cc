// A library with cuBLASLt's functions that is of another major version than the headers: each
// gives that version.
#include "worker/ops/cuda/cublas_lt.h"

#define ZS_OLD(function)                             \
  extern "C" size_t old_##function() asm(#function); \
  size_t old_##function() { return 10000 * (CUBLAS_VER_MAJOR - 1); }
ZS_CUBLASLT_FUNCTIONS(ZS_OLD)
