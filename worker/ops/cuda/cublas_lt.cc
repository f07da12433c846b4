#include "worker/ops/cuda/cublas_lt.h"

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/device/cuda/dynamic_library.h"

namespace zeroshard::cuda {
namespace {

// The table's types are those of one major version.
constexpr size_t kVersionsOfAMajor = 10000;

}  // namespace

absl::StatusOr<CublasLt> LoadCublasLt(const std::vector<std::string>& names) {
  const std::string remedy = absl::StrCat(
      "install cuBLAS of CUDA ", CUBLAS_VER_MAJOR, " (NVIDIA's package libcublas-",
      CUBLAS_VER_MAJOR, "-N), name the folder that has it in LD_LIBRARY_PATH, or use --device cpu");
  ZS_ASSIGN_OR_RETURN(const DynamicLibrary library,
                      DynamicLibrary::Open("cuBLASLt", names, remedy));
  CublasLt table;
#define ZS_FIND(function) ZS_RETURN_IF_ERROR(library.Find(#function, &table.function));
  ZS_CUBLASLT_FUNCTIONS(ZS_FIND)
#undef ZS_FIND
  const size_t version = table.cublasLtGetVersion();
  if (version / kVersionsOfAMajor == CUBLAS_VER_MAJOR) return table;
  return absl::FailedPreconditionError(absl::StrCat("cuBLASLt, loaded as ", library.name(),
                                                    ", has version code ", version, ", wanted ",
                                                    CUBLAS_VER_MAJOR, "xxxx; ", remedy));
}

absl::StatusOr<const CublasLt*> LoadCublasLt() {
  static const auto* const loaded = new absl::StatusOr<CublasLt>(LoadCublasLt(
      {absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR), std::string("libcublasLt.so")}));
  if (!loaded->ok()) return loaded->status();
  return &**loaded;
}

}  // namespace zeroshard::cuda
