#include "worker/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "worker/ops/cpu_isa.h"
#include "worker/ops/dropout.h"
#include "worker/ops/task_team.h"
#include "worker/ops/tile_kernels.h"

namespace zeroshard::cpu {
namespace {

constexpr int64_t kTile = 128;

const void* At(const void* base, int64_t index, DType type) {
  return static_cast<const char*>(base) + index * static_cast<int64_t>(SizeOf(type));
}
void* At(void* base, int64_t index, DType type) {
  return static_cast<char*>(base) + index * static_cast<int64_t>(SizeOf(type));
}

// Cuts one allocation into pieces at multiples of 64 bytes. The first pass, over null, counts.
class Pieces {
 public:
  explicit Pieces(void* base) : base_(static_cast<char*>(base)) {}
  void* Take(int64_t count, DType type) {
    const auto offset = static_cast<int64_t>(used_);
    used_ += static_cast<size_t>(RoundUp(count * static_cast<int64_t>(SizeOf(type)), 64));
    return base_ == nullptr ? nullptr : base_ + offset;
  }
  float* TakeFloats(int64_t count) { return static_cast<float*>(Take(count, DType::kF32)); }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

template <typename Workspace>
Workspace Carve(const AttentionArgs& args, DType work, Scratch* scratch) {
  Workspace space;
  Pieces count(nullptr);
  space.Take(args, work, &count);
  Pieces pieces(scratch->Bytes(count.used()));
  space.Take(args, work, &pieces);
  return space;
}

// The shapes of a call and the products of its tiles, in the type `work`.
struct Geometry {
  explicit Geometry(const AttentionArgs& args)
      : args(args),
        work(args.dtype == DType::kBF16 && HasNativeBf16() ? DType::kBF16 : DType::kF32),
        tiles(CeilDiv(args.seq, kTile)),
        drops(args.dropout.rate > 0),
        scale(1.0f / std::sqrt(static_cast<float>(args.head_dim))) {}

  int64_t Rows(int64_t tile) const { return std::min(kTile, args.seq - tile * kTile); }
  // Element of [B*T, heads*D] at the start of a head's sequence.
  static int64_t Start(int64_t sample, int64_t seq, int64_t head, int64_t dim, int64_t ld) {
    return sample * seq * ld + head * dim;
  }
  int64_t Start(int64_t sample, int64_t head, int64_t ld) const {
    return Start(sample, args.seq, head, args.head_dim, ld);
  }
  const int32_t* DocumentStarts(int64_t sample, int64_t query_tile) const {
    if (args.document_start == nullptr) return nullptr;
    return args.document_start + sample * args.seq + query_tile * kTile;
  }
  // Starts never fall: the first query of a tile sees the furthest back.
  int64_t FirstKeyTile(int64_t sample, int64_t query_tile) const {
    const int32_t* starts = DocumentStarts(sample, query_tile);
    return starts == nullptr ? 0 : starts[0] / kTile;
  }
  // `factors`: room for dropout's, used where there is any.
  ScoreTile Scores(int64_t sample, int64_t head, int64_t query_tile, int64_t key_tile,
                   float* factors) const {
    ScoreTile tile{.rows = Rows(query_tile),
                   .cols = Rows(key_tile),
                   .diagonal = (query_tile - key_tile) * kTile,
                   .scale = scale,
                   .document_start = DocumentStarts(sample, query_tile),
                   .first_key = key_tile * kTile};
    if (!drops) return tile;
    const DropoutMask mask(args.dropout, args.dropout.first_sample + sample);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t row = head * args.seq + query_tile * kTile + r;
      // Behind the diagonal nothing is read.
      const int64_t n = std::min(tile.cols, r + tile.diagonal + 1);
      mask.Factors(row * args.seq + tile.first_key, n, factors + r * tile.cols);
      std::fill(factors + r * tile.cols + n, factors + (r + 1) * tile.cols, 0.0f);
    }
    tile.factors = factors;
    return tile;
  }
  // A whole head [T, D], dense and in the work type.
  void PackHead(const void* base, int64_t ld, int64_t sample, int64_t head, void* to) const {
    PackBlock(At(base, Start(sample, head, ld), args.dtype), ld, args.dtype, args.seq,
              args.head_dim, to, work);
  }
  // Rows of a packed head.
  void* TileOf(void* head, int64_t tile) const {
    return At(head, tile * kTile * args.head_dim, work);
  }

  ProductKey Product(int64_t m, int64_t n, int64_t k, bool accumulate) const {
    return {.m = m, .n = n, .k = k, .ab_type = work, .accumulate = accumulate};
  }
  // scores[q, k] = x[q, D] * y[k, D]^T
  ProductKey RowsByRows(const ScoreTile& tile) const {
    ProductKey key = Product(tile.rows, tile.cols, args.head_dim, false);
    key.transpose_b = true;
    return key;
  }
  // z[q, D] (+)= scores[q, k] * y[k, D]
  ProductKey ScoresByRows(const ScoreTile& tile, bool accumulate) const {
    return Product(tile.rows, args.head_dim, tile.cols, accumulate);
  }
  // z[k, D] (+)= scores[q, k]^T * x[q, D]
  ProductKey ScoresTransposedByRows(const ScoreTile& tile, bool accumulate) const {
    ProductKey key = Product(tile.cols, args.head_dim, tile.rows, accumulate);
    key.transpose_a = true;
    return key;
  }

  const AttentionArgs& args;
  const DType work;
  const int64_t tiles;
  const bool drops;
  const float scale;
};

struct ForwardSpace {
  void *k, *v;  // [T, D]
  void* q;      // [tile, D]
  float* scores;
  void* weights;   // [tile, tile]; the scores' own memory where the work is fp32
  float* out;      // [tile, D]
  float* factors;  // [tile, tile], with dropout
  float *max, *sum, *shrink;

  void Take(const AttentionArgs& args, DType work, Pieces* pieces) {
    const int64_t rows = std::min(kTile, args.seq);
    k = pieces->Take(args.seq * args.head_dim, work);
    v = pieces->Take(args.seq * args.head_dim, work);
    q = pieces->Take(rows * args.head_dim, work);
    scores = pieces->TakeFloats(rows * rows);
    weights = work == DType::kF32 ? scores : pieces->Take(rows * rows, work);
    out = pieces->TakeFloats(rows * args.head_dim);
    factors = args.dropout.rate > 0 ? pieces->TakeFloats(rows * rows) : nullptr;
    max = pieces->TakeFloats(rows);
    sum = pieces->TakeFloats(rows);
    shrink = pieces->TakeFloats(rows);
  }
};

void ForwardHead(const Geometry& g, int64_t sample, int64_t head, void* out, float* lse,
                 ProductContext* context) {
  const AttentionArgs& args = g.args;
  const auto space = Carve<ForwardSpace>(args, g.work, context->buffer());
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const int64_t ld_out = args.heads * args.head_dim;
  g.PackHead(args.k, args.ld_k, sample, kv_head, space.k);
  g.PackHead(args.v, args.ld_v, sample, kv_head, space.v);
  for (int64_t i = 0; i < g.tiles; ++i) {
    const int64_t rows = g.Rows(i);
    const int64_t first = g.Start(sample, head, args.ld_q) + i * kTile * args.ld_q;
    PackBlock(At(args.q, first, args.dtype), args.ld_q, args.dtype, rows, args.head_dim, space.q,
              g.work);
    std::fill_n(space.max, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(space.sum, rows, 0.0f);
    const int64_t first_tile = g.FirstKeyTile(sample, i);
    for (int64_t j = first_tile; j <= i; ++j) {
      const ScoreTile tile = g.Scores(sample, head, i, j, space.factors);
      context->Run(g.RowsByRows(tile), space.q, g.TileOf(space.k, j), space.scores);
      SoftmaxStep(tile, space.scores, space.max, space.sum, space.shrink, space.weights, g.work);
      if (j > first_tile) ScaleRows(space.shrink, rows, args.head_dim, space.out);
      context->Run(g.ScoresByRows(tile, j > first_tile), space.weights, g.TileOf(space.v, j),
                   space.out);
    }
    const int64_t to = g.Start(sample, head, ld_out) + i * kTile * ld_out;
    FinishSoftmax(space.out, space.max, space.sum, rows, args.head_dim, At(out, to, args.dtype),
                  ld_out, args.dtype, lse + (sample * args.heads + head) * args.seq + i * kTile);
  }
}

struct BackwardSpace {
  void *q, *k, *v, *d_out;       // [T, D]
  float *sum_q, *sum_k, *sum_v;  // [T, D], gradients
  float* delta;                  // [T]
  float *scores, *d_weights;     // [tile, tile]
  float* factors;                // [tile, tile], with dropout
  void *weights, *d_scores;      // the memory of the two above where the work is fp32

  void Take(const AttentionArgs& args, DType work, Pieces* pieces) {
    const int64_t head = args.seq * args.head_dim;
    const int64_t rows = std::min(kTile, args.seq);
    for (void** each : {&q, &k, &v, &d_out}) *each = pieces->Take(head, work);
    for (float** each : {&sum_q, &sum_k, &sum_v}) *each = pieces->TakeFloats(head);
    delta = pieces->TakeFloats(args.seq);
    scores = pieces->TakeFloats(rows * rows);
    d_weights = pieces->TakeFloats(rows * rows);
    factors = args.dropout.rate > 0 ? pieces->TakeFloats(rows * rows) : nullptr;
    weights = work == DType::kF32 ? scores : pieces->Take(rows * rows, work);
    d_scores = work == DType::kF32 ? d_weights : pieces->Take(rows * rows, work);
  }
};

// The gradients of one query head: sum_q, and its part of sum_k and sum_v.
void BackwardQueryHead(const Geometry& g, const BackwardSpace& space, int64_t sample, int64_t head,
                       const float* lse, bool first_of_group, ProductContext* context) {
  const int64_t dim = g.args.head_dim;
  for (int64_t j = 0; j < g.tiles; ++j) {
    const int64_t key_row = j * kTile;
    for (int64_t i = j; i < g.tiles; ++i) {
      const int64_t first_tile = g.FirstKeyTile(sample, i);
      if (first_tile > j) break;  // so are those of later queries
      const int64_t row = i * kTile;
      const ScoreTile tile = g.Scores(sample, head, i, j, space.factors);
      const bool more = i > j || !first_of_group;
      context->Run(g.RowsByRows(tile), g.TileOf(space.q, i), g.TileOf(space.k, j), space.scores);
      context->Run(g.RowsByRows(tile), g.TileOf(space.d_out, i), g.TileOf(space.v, j),
                   space.d_weights);
      SoftmaxGradient(tile, space.scores, space.d_weights, lse + row, space.delta + row,
                      space.weights, space.d_scores, g.work);
      context->Run(g.ScoresTransposedByRows(tile, more), space.weights, g.TileOf(space.d_out, i),
                   space.sum_v + key_row * dim);
      context->Run(g.ScoresTransposedByRows(tile, more), space.d_scores, g.TileOf(space.q, i),
                   space.sum_k + key_row * dim);
      context->Run(g.ScoresByRows(tile, j > first_tile), space.d_scores, g.TileOf(space.k, j),
                   space.sum_q + row * dim);
    }
  }
}

void BackwardGroup(const Geometry& g, int64_t sample, int64_t kv_head, const void* out,
                   const void* d_out, const float* lse, void* d_q, void* d_k, void* d_v,
                   ProductContext* context) {
  const AttentionArgs& args = g.args;
  const auto space = Carve<BackwardSpace>(args, g.work, context->buffer());
  const int64_t group = args.heads / args.kv_heads;
  const int64_t ld_out = args.heads * args.head_dim;
  const auto store = [&](const float* sum, int64_t head, void* to, int64_t ld) {
    StoreBlock(sum, args.seq, args.head_dim, nullptr, args.dtype, false,
               At(to, g.Start(sample, head, ld), args.dtype), ld, args.dtype);
  };
  g.PackHead(args.k, args.ld_k, sample, kv_head, space.k);
  g.PackHead(args.v, args.ld_v, sample, kv_head, space.v);
  for (int64_t member = 0; member < group; ++member) {
    const int64_t head = kv_head * group + member;
    const int64_t at_out = g.Start(sample, head, ld_out);
    g.PackHead(args.q, args.ld_q, sample, head, space.q);
    g.PackHead(d_out, ld_out, sample, head, space.d_out);
    RowDots(At(d_out, at_out, args.dtype), ld_out, At(out, at_out, args.dtype), ld_out, args.dtype,
            args.seq, args.head_dim, space.delta);
    BackwardQueryHead(g, space, sample, head, lse + (sample * args.heads + head) * args.seq,
                      member == 0, context);
    store(space.sum_q, head, d_q, args.ld_q);
  }
  store(space.sum_k, kv_head, d_k, args.ld_k);
  store(space.sum_v, kv_head, d_v, args.ld_v);
}

}  // namespace

absl::Status CheckAttention(const AttentionArgs& args) {
  const auto refuse = [&args](auto... what) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention over ", args.batch, " sequences of ", args.seq, ", ", args.heads,
                     " heads of ", args.head_dim, ", ", args.kv_heads, " key heads: ", what...));
  };
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (const int64_t size : {args.batch, args.seq, args.heads, args.kv_heads, args.head_dim}) {
    if (size < 0 || size > kMost) return refuse("no size may be negative or pass ", kMost);
  }
  if (!IsFloat(args.dtype)) {
    return refuse("the type is ", NameOf(args.dtype), ", wanted fp32, bf16 or fp16");
  }
  if (args.heads == 0 || args.kv_heads == 0 || args.head_dim == 0) {
    return refuse("there must be a head, a key head and a dimension");
  }
  if (args.heads % args.kv_heads != 0) {
    return refuse("the heads must be a multiple of the key heads");
  }
  if (args.ld_q < args.heads * args.head_dim) {
    return refuse("ld_q is ", args.ld_q, ", wanted at least ", args.heads * args.head_dim);
  }
  if (args.ld_k < args.kv_heads * args.head_dim || args.ld_v < args.kv_heads * args.head_dim) {
    return refuse("ld_k and ld_v are ", args.ld_k, " and ", args.ld_v, ", wanted at least ",
                  args.kv_heads * args.head_dim);
  }
  if (!(args.dropout.rate >= 0 && args.dropout.rate <= 1)) {
    return refuse("the dropout rate is ", args.dropout.rate, ", wanted 0 to 1");
  }
  if (args.document_start == nullptr) return absl::OkStatus();
  for (int64_t b = 0; b < args.batch; ++b) {
    const int32_t* starts = args.document_start + b * args.seq;
    for (int64_t t = 0; t < args.seq; ++t) {
      const int32_t least = t == 0 ? 0 : starts[t - 1];
      if (starts[t] < least || starts[t] > t) {
        return refuse("document_start of sequence ", b, ", position ", t, " is ", starts[t],
                      ", wanted ", least, " to ", t);
      }
    }
  }
  return absl::OkStatus();
}

void AttentionForward(const AttentionArgs& args, void* out, float* lse, int threads,
                      std::vector<ProductContext>* contexts) {
  const Geometry g(args);
  RunTasks(threads, args.seq == 0 ? 0 : args.batch * args.heads, [&](int64_t task, int thread) {
    ForwardHead(g, task / args.heads, task % args.heads, out, lse, &(*contexts)[thread]);
  });
}

void AttentionBackward(const AttentionArgs& args, const void* out, const void* d_out,
                       const float* lse, void* d_q, void* d_k, void* d_v, int threads,
                       std::vector<ProductContext>* contexts) {
  const Geometry g(args);
  RunTasks(threads, args.seq == 0 ? 0 : args.batch * args.kv_heads, [&](int64_t task, int thread) {
    BackwardGroup(g, task / args.kv_heads, task % args.kv_heads, out, d_out, lse, d_q, d_k, d_v,
                  &(*contexts)[thread]);
  });
}

}  // namespace zeroshard::cpu
