// cuBLASLt's functions, loaded when the first product is prepared: a worker that computes on the
// CPU neither needs the library nor waits for it.
#pragma once

#include <cublasLt.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"

#define ZS_CUBLASLT_FUNCTIONS(X)          \
  X(cublasLtCreate)                       \
  X(cublasLtDestroy)                      \
  X(cublasLtGetStatusName)                \
  X(cublasLtGetStatusString)              \
  X(cublasLtGetVersion)                   \
  X(cublasLtMatmul)                       \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)

namespace zeroshard::cuda {

// None is null in a table that was loaded.
struct CublasLt {
#define ZS_MEMBER(function) decltype(&::function) function = nullptr;
  ZS_CUBLASLT_FUNCTIONS(ZS_MEMBER)
#undef ZS_MEMBER
};

// The table of the process, the library of the header's major version. The first call loads it and
// every later one has the same answer; thread-safe; lives as long as the process. No GPU is needed.
// FAILED_PRECONDITION where the library, a function of it or that version is missing.
absl::StatusOr<const CublasLt*> LoadCublasLt();

// The same of the first of `names` that is found, and anew each time.
absl::StatusOr<CublasLt> LoadCublasLt(const std::vector<std::string>& names);

}  // namespace zeroshard::cuda
