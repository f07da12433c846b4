// Ops::Matmul through cuBLASLt, with fp32 accumulation. The algorithm of a problem (its shapes,
// types, epilogue and alignment) is asked for once and kept, so that a shape has one algorithm, the
// same in every run on one kind of GPU and version of the library. Split sums are allowed only
// where they are reduced through the workspace, in fp32 and in a fixed order.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "absl/container/node_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/ops/cuda/matmul_problem.h"
#include "worker/ops/ops.h"

namespace zeroshard::cuda {

constexpr size_t kMatmulWorkspace = size_t{32} << 20;

// Serves one thread at a time.
class MatmulLibrary {
 public:
  // allow_tf32: fp32 operands are multiplied in TF32, about eight times faster and with 10 bits of
  // fraction. The device must be current. FAILED_PRECONDITION where the library is missing
  // (LoadCublasLt) or cannot use the GPU, RESOURCE_EXHAUSTED without memory.
  static absl::StatusOr<std::unique_ptr<MatmulLibrary>> Create(bool allow_tf32);

  // Enqueues the product. workspace: kMatmulWorkspace bytes, 256-byte aligned, of this stream's
  // calls alone. INVALID_ARGUMENT for arguments that cannot be; UNIMPLEMENTED where the library has
  // no algorithm; INTERNAL with the library's text where it fails; all name the product.
  absl::Status Run(cudaStream_t stream, const MatmulArgs& args, void* workspace);
  // The product times GELU's slope at x [m, n] in one pass, rounded once; errors as above. False,
  // and nothing is enqueued, where TakesGeluSlope says no or the library has no algorithm: the same
  // on every call and every rank with such a GPU.
  absl::StatusOr<bool> RunTimesGeluSlope(cudaStream_t stream, const MatmulArgs& args, const void* x,
                                         void* workspace);

  bool allow_tf32() const { return allow_tf32_; }
  // Of the library, once one was made: 130002 is 13.0.2.
  static size_t version();

 private:
  struct Plan;
  struct Close {
    void operator()(cublasLtHandle_t handle) const;
  };

  MatmulLibrary(cublasLtHandle_t handle, bool allow_tf32);
  // Null where the library has no algorithm; it is asked with `bias` where the problem has one.
  absl::StatusOr<Plan*> Find(const ColumnMajorProblem& problem, const void* bias);
  absl::Status Enqueue(cudaStream_t stream, const ColumnMajorProblem& problem,
                       const MatmulArgs& args, Plan* plan, void* workspace);

  const std::unique_ptr<std::remove_pointer_t<cublasLtHandle_t>, Close> handle_;
  const bool allow_tf32_;
  absl::node_hash_map<ColumnMajorProblem, std::unique_ptr<Plan>> plans_;

 public:
  ~MatmulLibrary();
};

// c[rows, columns] = bias (zeros where it is null) in each row, or c + bias with accumulate; bias
// of bias_type, c of c_type. What the library does not do: products over nothing, and a 16-bit
// bias of an fp32 result.
cudaError_t FillRows(cudaStream_t stream, const void* bias, DType bias_type, int64_t rows,
                     int64_t columns, bool accumulate, DType c_type, void* c);

}  // namespace zeroshard::cuda
