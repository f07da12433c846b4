// A row-major product as the column-major problem that cuBLASLt solves. A row-major matrix is its
// transpose in column-major, so C = op(A) op(B) is C^T = op(B)^T op(A)^T: the operands change
// places and nothing is copied. Pure functions of the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/ops/ops.h"

namespace zeroshard::cuda {

// A matrix [rows, columns] stored column after column, `ld` elements apart.
struct ColumnMajor {
  int64_t rows = 0, columns = 0, ld = 0;
  bool transpose = false;  // the product takes its transpose
  int alignment = 0;       // bytes that divide its address, at most 256

  friend bool operator==(const ColumnMajor&, const ColumnMajor&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const ColumnMajor& x) {
    return H::combine(std::move(h), x.rows, x.columns, x.ld, x.transpose, x.alignment);
  }
};

// result[rows, columns] = op(left) op(right) (+ bias[rows] in each column) (+ result), or times
// GELU's slope where that is asked for. All that an algorithm is chosen by: its key.
struct ColumnMajorProblem {
  int64_t depth = 0;
  ColumnMajor left, right, result;
  DType operand_type = DType::kF32, result_type = DType::kF32;
  bool accumulate = false;
  bool bias = false;        // of operand_type
  bool gelu_slope = false;  // (tanh approximation) at another matrix like the result
  bool tf32 = false;        // fp32 operands are rounded to 10 bits of fraction

  friend bool operator==(const ColumnMajorProblem&, const ColumnMajorProblem&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const ColumnMajorProblem& x) {
    return H::combine(std::move(h), x.depth, x.left, x.right, x.result, x.operand_type,
                      x.result_type, x.accumulate, x.bias, x.gelu_slope, x.tf32);
  }
};

// Bytes, at most 16: no load is wider. More would tell problems apart that are one, and give a
// matrix another algorithm, and other bits, where it lies elsewhere.
inline int AlignmentOf(const void* address) {
  const auto number = reinterpret_cast<uintptr_t>(address);
  return number == 0 ? 16 : static_cast<int>(std::min<uintptr_t>(number & (~number + 1), 16));
}

// Of checked arguments (cpu::CheckMatmul) with no size 0. Whether the library adds the bias: only
// to a result of the operands' type, of which it has kernels.
inline ColumnMajorProblem ProblemOf(const MatmulArgs& args, bool tf32) {
  ColumnMajorProblem problem;
  problem.depth = args.k;
  // Row-major [r, c] is column-major [c, r], which lies as the product wants it where the row-major
  // operand is not transposed.
  const auto operand = [](const void* data, int64_t rows, int64_t columns, bool transpose) {
    return ColumnMajor{columns, rows, columns, transpose, AlignmentOf(data)};
  };
  problem.left = args.transpose_b ? operand(args.b, args.n, args.k, true)
                                  : operand(args.b, args.k, args.n, false);
  problem.right = args.transpose_a ? operand(args.a, args.k, args.m, true)
                                   : operand(args.a, args.m, args.k, false);
  problem.result = operand(args.c, args.m, args.n, false);
  problem.operand_type = args.ab_type;
  problem.result_type = args.c_type;
  problem.accumulate = args.accumulate;
  problem.bias = args.bias != nullptr && args.ab_type == args.c_type;
  problem.tf32 = tf32 && args.ab_type == DType::kF32;
  return problem;
}

// Whether the library may multiply by GELU's slope at `x` itself: bf16, whose rounding hides how it
// takes the hyperbolic tangent, and lies as its epilogue wants it.
inline bool TakesGeluSlope(const MatmulArgs& args, const void* x) {
  return args.ab_type == DType::kBF16 && args.c_type == DType::kBF16 && args.bias == nullptr &&
         !args.accumulate && args.m > 0 && args.n > 0 && args.k > 0 && args.n % 8 == 0 &&
         AlignmentOf(x) >= 16;
}

// As its caller would write it.
inline std::string Describe(const ColumnMajorProblem& p) {
  return absl::StrCat("product [", p.result.columns, ", ", p.depth, "]",
                      p.right.transpose ? " (stored transposed)" : "", " by [", p.depth, ", ",
                      p.result.rows, "]", p.left.transpose ? " (stored transposed)" : "", " of ",
                      NameOf(p.operand_type), " into ", NameOf(p.result_type),
                      p.accumulate ? ", accumulated" : "", p.bias ? ", with bias" : "",
                      p.gelu_slope ? ", times GELU's slope" : "", p.tf32 ? ", in TF32" : "");
}

}  // namespace zeroshard::cuda
