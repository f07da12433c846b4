#include "worker/ops/cuda/matmul.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/ops/cuda/cublas_lt.h"
#include "worker/ops/cuda/launch.h"
#include "worker/ops/matmul.h"

namespace zeroshard::cuda {
namespace {

// Generation multiplies by as many rows as a prompt has; a job has some dozens of shapes.
constexpr size_t kMostPlans = 4096;

// MatmulLibrary::Create has loaded it.
const CublasLt& Lt() { return **LoadCublasLt(); }

absl::Status BlasStatus(cublasStatus_t status, const char* call, const std::string& where) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string text =
      absl::StrCat(where, ": ", call, " gave ", Lt().cublasLtGetStatusName(status), " (",
                   Lt().cublasLtGetStatusString(status), ")");
  switch (status) {
    case CUBLAS_STATUS_NOT_INITIALIZED:
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return absl::FailedPreconditionError(absl::StrCat(
          text,
          "; cuBLASLt cannot use this GPU: see that nvidia-smi lists it, and that its driver "
          "is new enough for CUDA ",
          CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10));
    case CUBLAS_STATUS_ALLOC_FAILED:
      return absl::ResourceExhaustedError(
          absl::StrCat(text, "; no memory left: use a smaller micro-batch or a higher ZeRO stage"));
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return absl::UnimplementedError(
          absl::StrCat(text, "; cuBLASLt has no kernel for it: pad its sizes to multiples of 8"));
    default:
      return absl::InternalError(absl::StrCat(
          text, "; it may belong to work that was enqueued earlier: run under compute-sanitizer"));
  }
}

cudaDataType_t TypeOf(DType type) {
  if (type == DType::kBF16) return CUDA_R_16BF;
  return type == DType::kF16 ? CUDA_R_16F : CUDA_R_32F;
}

cublasLtEpilogue_t EpilogueOf(const ColumnMajorProblem& p) {
  if (p.gelu_slope) return CUBLASLT_EPILOGUE_DGELU;
  return p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

struct Destroy {
  void operator()(cublasLtMatmulDesc_t x) const { Lt().cublasLtMatmulDescDestroy(x); }
  void operator()(cublasLtMatrixLayout_t x) const { Lt().cublasLtMatrixLayoutDestroy(x); }
  void operator()(cublasLtMatmulPreference_t x) const { Lt().cublasLtMatmulPreferenceDestroy(x); }
};
template <typename Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;

#define ZS_BLAS(function, ...) \
  ZS_RETURN_IF_ERROR(BlasStatus(Lt().function(__VA_ARGS__), #function, where))

absl::Status MakeLayout(const ColumnMajor& matrix, DType type, const std::string& where,
                        Owned<cublasLtMatrixLayout_t>* layout) {
  cublasLtMatrixLayout_t made = nullptr;
  ZS_BLAS(cublasLtMatrixLayoutCreate, &made, TypeOf(type), static_cast<uint64_t>(matrix.rows),
          static_cast<uint64_t>(matrix.columns), matrix.ld);
  layout->reset(made);
  return absl::OkStatus();
}

template <typename T>
absl::Status Set(const Owned<cublasLtMatmulDesc_t>& product,
                 cublasLtMatmulDescAttributes_t attribute, T value, const std::string& where) {
  return BlasStatus(
      Lt().cublasLtMatmulDescSetAttribute(product.get(), attribute, &value, sizeof(value)),
      "cublasLtMatmulDescSetAttribute", where);
}
template <typename T>
absl::Status Set(const Owned<cublasLtMatmulPreference_t>& preference,
                 cublasLtMatmulPreferenceAttributes_t attribute, T value,
                 const std::string& where) {
  return BlasStatus(
      Lt().cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)),
      "cublasLtMatmulPreferenceSetAttribute", where);
}

absl::Status MakeProduct(const ColumnMajorProblem& problem, const std::string& where,
                         const void* bias, Owned<cublasLtMatmulDesc_t>* product) {
  cublasLtMatmulDesc_t made = nullptr;
  const cublasComputeType_t compute =
      problem.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  ZS_BLAS(cublasLtMatmulDescCreate, &made, compute, CUDA_R_32F);
  product->reset(made);
  const auto transposed = [](bool is) { return is ? CUBLAS_OP_T : CUBLAS_OP_N; };
  ZS_RETURN_IF_ERROR(
      Set(*product, CUBLASLT_MATMUL_DESC_TRANSA, transposed(problem.left.transpose), where));
  ZS_RETURN_IF_ERROR(
      Set(*product, CUBLASLT_MATMUL_DESC_TRANSB, transposed(problem.right.transpose), where));
  ZS_RETURN_IF_ERROR(Set(*product, CUBLASLT_MATMUL_DESC_EPILOGUE, EpilogueOf(problem), where));
  if (problem.bias) {
    const auto type = static_cast<int32_t>(TypeOf(problem.operand_type));
    ZS_RETURN_IF_ERROR(Set(*product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type, where));
    ZS_RETURN_IF_ERROR(Set(*product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias, where));
  }
  if (problem.gelu_slope) {
    ZS_RETURN_IF_ERROR(
        Set(*product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, problem.result.ld, where));
  }
  return absl::OkStatus();
}

absl::Status MakePreference(const ColumnMajorProblem& problem, const std::string& where,
                            Owned<cublasLtMatmulPreference_t>* preference) {
  cublasLtMatmulPreference_t made = nullptr;
  ZS_BLAS(cublasLtMatmulPreferenceCreate, &made);
  preference->reset(made);
  ZS_RETURN_IF_ERROR(
      Set(*preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMatmulWorkspace, where));
  // In place it adds in any order; in the output's type it rounds every part.
  ZS_RETURN_IF_ERROR(Set(*preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                         uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE}, where));
  const std::pair<cublasLtMatmulPreferenceAttributes_t, int> alignments[] = {
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem.left.alignment},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem.right.alignment},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem.result.alignment},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem.result.alignment}};
  for (const auto& [attribute, bytes] : alignments) {
    ZS_RETURN_IF_ERROR(Set(*preference, attribute, static_cast<uint32_t>(bytes), where));
  }
  return absl::OkStatus();
}

}  // namespace

struct MatmulLibrary::Plan {
  Owned<cublasLtMatmulDesc_t> product;
  Owned<cublasLtMatrixLayout_t> left, right, result;
  cublasLtMatmulAlgo_t algorithm;
};

MatmulLibrary::MatmulLibrary(cublasLtHandle_t handle, bool allow_tf32)
    : handle_(handle), allow_tf32_(allow_tf32) {}
MatmulLibrary::~MatmulLibrary() = default;

void MatmulLibrary::Close::operator()(cublasLtHandle_t handle) const {
  Lt().cublasLtDestroy(handle);
}

size_t MatmulLibrary::version() { return Lt().cublasLtGetVersion(); }

absl::StatusOr<std::unique_ptr<MatmulLibrary>> MatmulLibrary::Create(bool allow_tf32) {
  ZS_RETURN_IF_ERROR(LoadCublasLt().status());
  const std::string where = "starting matrix products on the GPU";
  cublasLtHandle_t handle = nullptr;
  ZS_BLAS(cublasLtCreate, &handle);
  return std::unique_ptr<MatmulLibrary>(new MatmulLibrary(handle, allow_tf32));
}

absl::StatusOr<MatmulLibrary::Plan*> MatmulLibrary::Find(const ColumnMajorProblem& problem,
                                                         const void* bias) {
  const auto found = plans_.find(problem);
  if (found != plans_.end()) return found->second.get();
  const std::string where = Describe(problem);
  auto plan = std::make_unique<Plan>();
  ZS_RETURN_IF_ERROR(MakeProduct(problem, where, bias, &plan->product));
  ZS_RETURN_IF_ERROR(MakeLayout(problem.left, problem.operand_type, where, &plan->left));
  ZS_RETURN_IF_ERROR(MakeLayout(problem.right, problem.operand_type, where, &plan->right));
  ZS_RETURN_IF_ERROR(MakeLayout(problem.result, problem.result_type, where, &plan->result));
  Owned<cublasLtMatmulPreference_t> preference;
  ZS_RETURN_IF_ERROR(MakePreference(problem, where, &preference));
  cublasLtMatmulHeuristicResult_t best = {};
  int count = 0;
  ZS_BLAS(cublasLtMatmulAlgoGetHeuristic, handle_.get(), plan->product.get(), plan->left.get(),
          plan->right.get(), plan->result.get(), plan->result.get(), preference.get(), 1, &best,
          &count);
  if (count > 0 && best.state != CUBLAS_STATUS_NOT_SUPPORTED) {
    ZS_RETURN_IF_ERROR(BlasStatus(best.state, "cublasLtMatmulAlgoGetHeuristic", where));
    plan->algorithm = best.algo;
  } else {
    plan = nullptr;
  }
  // Asked for again, a problem gets the same algorithm.
  if (plans_.size() >= kMostPlans) plans_.clear();
  return plans_.emplace(problem, std::move(plan)).first->second.get();
}

absl::Status MatmulLibrary::Run(cudaStream_t stream, const MatmulArgs& args, void* workspace) {
  ZS_RETURN_IF_ERROR(cpu::CheckMatmul(args));
  if (args.m == 0 || args.n == 0) return absl::OkStatus();
  ColumnMajorProblem problem = ProblemOf(args, allow_tf32_);
  if (args.k == 0 || (args.bias != nullptr && !problem.bias)) {
    ZS_RETURN_IF_ERROR(StatusOf(FillRows(stream, args.bias, args.ab_type, args.m, args.n,
                                         args.accumulate, args.c_type, args.c),
                                "bias of a matrix product"));
    if (args.k == 0) return absl::OkStatus();
    problem.accumulate = true;
  }
  ZS_ASSIGN_OR_RETURN(Plan * plan, Find(problem, args.bias));
  if (plan == nullptr && problem.bias) {  // no kernel adds it: it is there before the product
    ZS_RETURN_IF_ERROR(StatusOf(FillRows(stream, args.bias, args.ab_type, args.m, args.n,
                                         args.accumulate, args.c_type, args.c),
                                "bias of a matrix product"));
    problem.bias = false;
    problem.accumulate = true;
    ZS_ASSIGN_OR_RETURN(plan, Find(problem, nullptr));
  }
  if (plan == nullptr) {
    return BlasStatus(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic",
                      Describe(problem));
  }
  if (problem.bias) {
    ZS_RETURN_IF_ERROR(Set(plan->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias,
                           "bias of a matrix product"));
  }
  return Enqueue(stream, problem, args, plan, workspace);
}

absl::StatusOr<bool> MatmulLibrary::RunTimesGeluSlope(cudaStream_t stream, const MatmulArgs& args,
                                                      const void* x, void* workspace) {
  ZS_RETURN_IF_ERROR(cpu::CheckMatmul(args));
  if (!TakesGeluSlope(args, x)) return false;
  ColumnMajorProblem problem = ProblemOf(args, allow_tf32_);
  problem.gelu_slope = true;
  ZS_ASSIGN_OR_RETURN(Plan * plan, Find(problem, nullptr));
  if (plan == nullptr) return false;
  ZS_RETURN_IF_ERROR(Set(plan->product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, x,
                         "input of GELU beside a matrix product"));
  ZS_RETURN_IF_ERROR(Enqueue(stream, problem, args, plan, workspace));
  return true;
}

absl::Status MatmulLibrary::Enqueue(cudaStream_t stream, const ColumnMajorProblem& problem,
                                    const MatmulArgs& args, Plan* plan, void* workspace) {
  const float one = 1, beta = problem.accumulate ? 1 : 0;
  const cublasStatus_t status = Lt().cublasLtMatmul(
      handle_.get(), plan->product.get(), &one, args.b, plan->left.get(), args.a, plan->right.get(),
      &beta, args.c, plan->result.get(), args.c, plan->result.get(), &plan->algorithm, workspace,
      kMatmulWorkspace, stream);
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return BlasStatus(status, "cublasLtMatmul", Describe(problem));
}

#undef ZS_BLAS

}  // namespace zeroshard::cuda
