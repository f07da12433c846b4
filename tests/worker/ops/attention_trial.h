// Attention by its definition in fp64, with documents and dropout, and one trial of the kernels
// beside it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "tests/worker/ops/dropout_reference.h"
#include "tests/worker/ops/typed_values.h"
#include "worker/ops/ops.h"

namespace zeroshard {

struct Shape {
  int64_t batch, seq, heads, kv_heads, dim;
  bool packed;                       // q, k and v side by side in one buffer
  std::vector<int32_t> starts = {};  // [batch, seq], or empty: documents
  DropoutArgs dropout = {};

  int64_t group() const { return heads / kv_heads; }
  int64_t rows() const { return batch * seq; }
};

inline std::string ToString(const Shape& s) {
  return "B" + std::to_string(s.batch) + "T" + std::to_string(s.seq) + "H" +
         std::to_string(s.heads) + "KV" + std::to_string(s.kv_heads) + "D" + std::to_string(s.dim) +
         (s.packed ? "Packed" : "Apart");
}
inline std::string NameOfShape(const testing::TestParamInfo<Shape>& info) {
  return ToString(info.param);
}
inline void PrintTo(const Shape& s, std::ostream* out) { *out << ToString(s); }

// Where the elements of q, k or v lie.
struct View {
  int64_t base, ld;
  int64_t At(const Shape& s, int64_t b, int64_t t, int64_t head, int64_t d) const {
    return base + (b * s.seq + t) * ld + head * s.dim + d;
  }
};
struct Views {
  explicit Views(const Shape& s) {
    const int64_t q_cols = s.heads * s.dim, kv_cols = s.kv_heads * s.dim;
    if (s.packed) {
      const int64_t ld = q_cols + 2 * kv_cols;
      q = {0, ld}, k = {q_cols, ld}, v = {q_cols + kv_cols, ld};
      count = s.rows() * ld;
    } else {
      q = {0, q_cols}, k = {s.rows() * q_cols, kv_cols};
      v = {s.rows() * (q_cols + kv_cols), kv_cols};
      count = s.rows() * (q_cols + 2 * kv_cols);
    }
  }
  View q, k, v;
  int64_t count;
};

// out [B*T, H*D], lse [B, H, T].
struct Reference {
  std::vector<double> out, lse;
};
inline Reference Define(const Shape& s, const std::vector<double>& qkv) {
  const Views views(s);
  Reference r{std::vector<double>(static_cast<size_t>(s.rows() * s.heads * s.dim)),
              std::vector<double>(static_cast<size_t>(s.rows() * s.heads))};
  const auto at = [&qkv](int64_t i) { return qkv[static_cast<size_t>(i)]; };
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      for (int64_t t = 0; t < s.seq; ++t) {
        const int64_t first = s.starts.empty() ? 0 : s.starts[static_cast<size_t>(b * s.seq + t)];
        std::vector<double> weight(static_cast<size_t>(t) + 1);
        double most = -std::numeric_limits<double>::infinity(), sum = 0;
        for (int64_t u = first; u <= t; ++u) {
          double dot = 0;
          for (int64_t d = 0; d < s.dim; ++d) {
            dot += at(views.q.At(s, b, t, h, d)) * at(views.k.At(s, b, u, h / s.group(), d));
          }
          weight[static_cast<size_t>(u)] = dot / std::sqrt(static_cast<double>(s.dim));
          most = std::max(most, weight[static_cast<size_t>(u)]);
        }
        for (int64_t u = first; u <= t; ++u) {
          double& w = weight[static_cast<size_t>(u)];
          sum += (w = std::exp(w - most));
          w *= DropoutFactor(s.dropout, s.dropout.first_sample + b, (h * s.seq + t) * s.seq + u);
        }
        for (int64_t d = 0; d < s.dim; ++d) {
          double value = 0;
          for (int64_t u = first; u <= t; ++u) {
            value += weight[static_cast<size_t>(u)] * at(views.v.At(s, b, u, h / s.group(), d));
          }
          r.out[static_cast<size_t>(((b * s.seq + t) * s.heads + h) * s.dim + d)] = value / sum;
        }
        r.lse[static_cast<size_t>((b * s.heads + h) * s.seq + t)] = most + std::log(sum);
      }
    }
  }
  return r;
}

// What the loss sum(out * d_out) is, and its gradient by the analytic formula in fp64.
inline double Loss(const Shape& s, const std::vector<double>& qkv,
                   const std::vector<double>& d_out) {
  const Reference r = Define(s, qkv);
  double loss = 0;
  for (size_t i = 0; i < d_out.size(); ++i) loss += r.out[i] * d_out[i];
  return loss;
}

struct Trial {
  Trial(const Shape& s, DType type, uint32_t seed = 7, float range = 2)
      : shape(s),
        qkv(TypedValues::Random(Views(s).count, type, seed, range)),
        d_out(TypedValues::Random(s.rows() * s.heads * s.dim, type, seed + 1)),
        out(s.rows() * s.heads * s.dim, type),
        lse(static_cast<size_t>(s.rows() * s.heads)),
        gradient(Views(s).count, type) {}

  AttentionArgs Args() const {
    const Views views(shape);
    return {.q = At(qkv, views.q),
            .k = At(qkv, views.k),
            .v = At(qkv, views.v),
            .ld_q = views.q.ld,
            .ld_k = views.k.ld,
            .ld_v = views.v.ld,
            .batch = shape.batch,
            .seq = shape.seq,
            .heads = shape.heads,
            .kv_heads = shape.kv_heads,
            .head_dim = shape.dim,
            .dtype = qkv.type(),
            .document_start = shape.starts.empty() ? nullptr : shape.starts.data(),
            .dropout = shape.dropout};
  }
  static void* At(const TypedValues& values, const View& view) {
    return const_cast<char*>(static_cast<const char*>(values.data())) +
           view.base * static_cast<int64_t>(SizeOf(values.type()));
  }

  void Forward(Ops* ops) {
    const absl::Status status = ops->AttentionForward(Args(), out.data(), lse.data());
    ASSERT_TRUE(status.ok()) << status;
  }
  void Backward(Ops* ops) {
    const Views views(shape);
    const absl::Status status =
        ops->AttentionBackward(Args(), out.data(), d_out.data(), lse.data(), At(gradient, views.q),
                               At(gradient, views.k), At(gradient, views.v));
    ASSERT_TRUE(status.ok()) << status;
  }

  Shape shape;
  TypedValues qkv, d_out, out;
  std::vector<float> lse;
  TypedValues gradient;
};

}  // namespace zeroshard
