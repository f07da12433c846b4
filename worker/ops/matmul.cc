#include "worker/ops/matmul.h"

#include <algorithm>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "worker/ops/cpu_isa.h"
#include "worker/ops/task_team.h"
#include "worker/ops/tile_kernels.h"

namespace zeroshard::cpu {
namespace {

constexpr int64_t kBlockM = 128;
constexpr int64_t kBlockN = 256;
constexpr int64_t kPanelK = 1024;

ProductKey WholeKey(const MatmulArgs& args, int threads) {
  ProductKey key{.m = args.m,
                 .n = args.n,
                 .k = args.k,
                 .transpose_a = args.transpose_a,
                 .transpose_b = args.transpose_b,
                 .ab_type = args.ab_type,
                 .c_type = args.c_type,
                 .bias = args.bias != nullptr,
                 .accumulate = args.accumulate,
                 .threads = threads};
  key.threads = ThreadsThatKeepBits(key);
  return key;
}

const void* At(const void* base, int64_t index, DType type) {
  return static_cast<const char*>(base) + index * static_cast<int64_t>(SizeOf(type));
}

// Part [row, row + rows) x [col, col + cols) of an operand in fp32: itself, or a dense copy where
// it must be widened, or where its rows lie a multiple of 4 KiB apart (oneDNN then runs at half its
// speed). Coordinates are those of the logical (not transposed) matrix.
struct Panel {
  const void* data;
  int64_t ld;
};
Panel PanelOf(const void* base, int64_t ld, bool transposed, DType type, int64_t row, int64_t rows,
              int64_t col, int64_t cols, float* copy) {
  if (transposed) {
    std::swap(row, col);
    std::swap(rows, cols);
  }
  const void* first = At(base, row * ld + col, type);
  if (type == DType::kF32 && ld % 1024 != 0) return {first, ld};
  PackBlock(first, ld, type, rows, cols, copy, DType::kF32);
  return {copy, 0};
}

void ComputeBlock(const MatmulArgs& args, int64_t row, int64_t col, ProductContext* context) {
  const int64_t rows = std::min(kBlockM, args.m - row);
  const int64_t cols = std::min(kBlockN, args.n - col);
  float* const memory =
      context->buffer()->Get<float>(kBlockM * kBlockN + (kBlockM + kBlockN) * kPanelK);
  float* const sum = memory;
  float* const a_copy = sum + kBlockM * kBlockN;
  float* const b_copy = a_copy + kBlockM * kPanelK;
  for (int64_t at = 0; at < args.k; at += kPanelK) {
    const int64_t depth = std::min(kPanelK, args.k - at);
    const Panel a = PanelOf(args.a, args.transpose_a ? args.m : args.k, args.transpose_a,
                            args.ab_type, row, rows, at, depth, a_copy);
    const Panel b = PanelOf(args.b, args.transpose_b ? args.k : args.n, args.transpose_b,
                            args.ab_type, at, depth, col, cols, b_copy);
    context->Run({.m = rows,
                  .n = cols,
                  .k = depth,
                  .ld_a = a.ld,
                  .ld_b = b.ld,
                  .transpose_a = args.transpose_a,
                  .transpose_b = args.transpose_b,
                  .accumulate = at > 0},
                 a.data, b.data, sum);
  }
  if (args.k == 0) std::fill_n(sum, rows * cols, 0.0f);
  const void* bias = args.bias == nullptr ? nullptr : At(args.bias, col, args.ab_type);
  void* c = const_cast<void*>(At(args.c, row * args.n + col, args.c_type));
  StoreBlock(sum, rows, cols, bias, args.ab_type, args.accumulate, c, args.n, args.c_type);
}

}  // namespace

absl::Status CheckMatmul(const MatmulArgs& args) {
  const auto refuse = [&args](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat("product of ", args.m, " x ", args.k, " by ",
                                                   args.k, " x ", args.n, ": ", what...));
  };
  if (args.m < 0 || args.n < 0 || args.k < 0) return refuse("a size is negative");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (args.m > kMost || args.n > kMost || args.k > kMost) {
    return refuse("no size may pass ", kMost);
  }
  if (!IsFloat(args.ab_type)) {
    return refuse("operands are ", NameOf(args.ab_type), ", wanted fp32, bf16 or fp16");
  }
  if (args.c_type != DType::kF32 && args.c_type != args.ab_type) {
    return refuse("the result is ", NameOf(args.c_type), ", wanted fp32 or the operands' ",
                  NameOf(args.ab_type));
  }
  if (args.m == 0 || args.n == 0) return absl::OkStatus();
  if (args.c == nullptr) return refuse("the result is a null pointer");
  if (args.k > 0 && (args.a == nullptr || args.b == nullptr)) {
    return refuse("an operand is a null pointer");
  }
  return absl::OkStatus();
}

MatmulPath ChoosePath(const MatmulArgs& args, int threads, ProductContext* context) {
  if (args.k == 0 || !HasBrgemm()) return MatmulPath::kBlocks;
  if (args.ab_type == DType::kBF16 && !HasNativeBf16()) return MatmulPath::kBlocks;
  if (args.ab_type == DType::kF16) return MatmulPath::kBlocks;
  const bool fast =
      absl::StartsWith(context->Find(WholeKey(args, threads))->implementation(), "brg:");
  return fast ? MatmulPath::kWhole : MatmulPath::kBlocks;
}

void Matmul(const MatmulArgs& args, int threads, std::vector<ProductContext>* contexts) {
  if (args.m == 0 || args.n == 0) return;
  ProductContext& own = contexts->front();
  const MatmulPath path = ChoosePath(args, threads, &own);
  if (path == MatmulPath::kBlocks) {
    const int64_t across = CeilDiv(args.n, kBlockN);
    RunTasks(threads, CeilDiv(args.m, kBlockM) * across, [&](int64_t block, int thread) {
      ComputeBlock(args, block / across * kBlockM, block % across * kBlockN, &(*contexts)[thread]);
    });
    return;
  }
  own.Find(WholeKey(args, threads))->Run(args.a, args.b, args.bias, args.c, own.scratchpad());
}

}  // namespace zeroshard::cpu
