// Every row-wise and element-wise method of Ops on a GPU against the CPU's: odd sizes, outputs that
// begin as NaNs, guards behind every array. Products and attention are in ops_gpu_test; rows of
// tables and sums in rows_test.cc.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/gpu/comparison.h"

namespace zeroshard {
namespace {

// Of results that are close (worker/ops/cuda/README.md): fp32 by the order of sums and the
// approximate exponential, 16 bits by one rounding that falls the other way.
double Close(DType type) { return type == DType::kF32 ? 5e-6 : 2 * RoundingOf(type); }

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

struct Matrix {
  int64_t rows, cols;
};
constexpr Matrix kMatrices[] = {{1, 1},    {3, 7},    {67, 129},  {130, 768},
                                {5, 1600}, {9, 4096}, {2, 12289}, {257, 31}};

class GpuOps : public ComparisonFixture, public testing::WithParamInterface<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, GpuOps, testing::ValuesIn(kTypes),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

TEST_P(GpuOps, ColumnSumHasTheCpusBits) {
  for (const auto& [rows, cols] : kMatrices) {
    for (const DType out_type : kTypes) {
      Arrays arrays;
      const int x = arrays.In(TypedValues::Random(rows * cols, GetParam(), 11));
      const int out = arrays.Out(cols, out_type, kSameBits);
      Compare(arrays, [&, rows = rows, cols = cols](Ops* ops, const std::vector<void*>& p) {
        ops->ColumnSum(p[x], rows, cols, GetParam(), p[out], out_type);
      });
    }
  }
}

TEST_P(GpuOps, LayerNormIsTheCpus) {
  const DType type = GetParam();
  for (const auto& [rows, cols] : kMatrices) {
    if (cols == 1) continue;  // the variance of one element is zero: rounding is all there is
    SCOPED_TRACE(testing::Message() << rows << " x " << cols);
    Arrays arrays;
    const int x = arrays.In(TypedValues::Random(rows * cols, type, 21, 3));
    const int w = arrays.In(TypedValues::Random(cols, type, 22));
    const int b = arrays.In(TypedValues::Random(cols, type, 23));
    const int dy = arrays.In(TypedValues::Random(rows * cols, type, 24));
    const int y = arrays.Out(rows * cols, type, Close(type));
    const int mean = arrays.Out(rows, DType::kF32, 1e-4);
    const int rstd = arrays.Out(rows, DType::kF32, 2e-6);
    const int dx = arrays.Out(rows * cols, type, 2 * Close(type));
    const int dx_more = arrays.InOut(TypedValues::Random(rows * cols, type, 25), 2 * Close(type));
    const int dw = arrays.Out(cols, type, 2 * Close(type));
    const int db = arrays.Out(cols, type, kSameBits);
    Compare(arrays, [&, rows = rows, cols = cols](Ops* ops, const std::vector<void*>& p) {
      auto* means = static_cast<float*>(p[mean]);
      auto* rstds = static_cast<float*>(p[rstd]);
      ops->LayerNormForward(p[x], p[w], p[b], rows, cols, 1e-5f, type, p[y], means, rstds);
      for (const bool more : {false, true}) {
        ops->LayerNormBackward(p[dy], p[x], p[w], means, rstds, rows, cols, type, more,
                               p[more ? dx_more : dx], p[dw], p[db]);
      }
    });
  }
}

TEST_P(GpuOps, RmsNormIsTheCpus) {
  const DType type = GetParam();
  for (const auto& [rows, cols] : kMatrices) {
    if (cols == 1) continue;
    SCOPED_TRACE(testing::Message() << rows << " x " << cols);
    Arrays arrays;
    const int x = arrays.In(TypedValues::Random(rows * cols, type, 31, 3));
    const int w = arrays.In(TypedValues::Random(cols, type, 32));
    const int dy = arrays.In(TypedValues::Random(rows * cols, type, 33));
    const int y = arrays.Out(rows * cols, type, Close(type));
    const int rstd = arrays.Out(rows, DType::kF32, 2e-6);
    const int dx = arrays.Out(rows * cols, type, 2 * Close(type));
    const int dx_more = arrays.InOut(TypedValues::Random(rows * cols, type, 34), 2 * Close(type));
    const int dw = arrays.Out(cols, type, 2 * Close(type));
    Compare(arrays, [&, rows = rows, cols = cols](Ops* ops, const std::vector<void*>& p) {
      auto* rstds = static_cast<float*>(p[rstd]);
      ops->RmsNormForward(p[x], p[w], rows, cols, 1e-6f, type, p[y], rstds);
      for (const bool more : {false, true}) {
        ops->RmsNormBackward(p[dy], p[x], p[w], rstds, rows, cols, type, more,
                             p[more ? dx_more : dx], p[dw]);
      }
    });
  }
}

constexpr int64_t kCounts[] = {1, 63, 1023, 100003};

TEST_P(GpuOps, ActivationsAreTheCpus) {
  const DType type = GetParam();
  for (const int64_t n : kCounts) {
    SCOPED_TRACE(n);
    Arrays arrays;
    const int x = arrays.In(TypedValues::Random(n, type, 41, 6));
    const int up = arrays.In(TypedValues::Random(n, type, 42, 2));
    const int dy = arrays.In(TypedValues::Random(n, type, 43));
    const int gelu = arrays.Out(n, type, Close(type)), d_gelu = arrays.Out(n, type, Close(type));
    const int swiglu = arrays.Out(n, type, Close(type));
    const int d_gate = arrays.Out(n, type, Close(type)), d_up = arrays.Out(n, type, Close(type));
    // In place, as the MLP has it.
    const int gate2 = arrays.InOut(TypedValues::Random(n, type, 44, 4), Close(type));
    const int up2 = arrays.InOut(TypedValues::Random(n, type, 45), Close(type));
    Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
      ops->GeluForward(p[x], n, type, p[gelu]);
      ops->GeluBackward(p[dy], p[x], n, type, p[d_gelu]);
      ops->SwiGluForward(p[x], p[up], n, type, p[swiglu]);
      ops->SwiGluBackward(p[dy], p[x], p[up], n, type, p[d_gate], p[d_up]);
      ops->SwiGluBackward(p[dy], p[gate2], p[up2], n, type, p[gate2], p[up2]);
    });
  }
}

// In bf16 the CPU rounds the product before it takes the slope, the GPU does not.
TEST_P(GpuOps, AProductTimesGelusSlopeIsTheCpus) {
  const DType type = GetParam();
  struct Sizes {
    int64_t m, n, k;
  };
  for (const auto& [m, n, k] : {Sizes{64, 256, 64}, Sizes{33, 3072, 768}, Sizes{7, 20, 12}}) {
    SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k);
    Arrays arrays;
    const int d_out = arrays.In(TypedValues::Random(m * k, type, 46));
    const int weight = arrays.In(TypedValues::Random(n * k, type, 47));
    const int x = arrays.In(TypedValues::Random(m * n, type, 48, 4));
    const int d_in = arrays.Out(m * n, type, type == DType::kF32 ? 2e-5 : 2 * Close(type));
    Compare(arrays, [&, m = m, n = n, k = k](Ops* ops, const std::vector<void*>& p) {
      MatmulArgs args{.a = p[d_out], .b = p[weight], .c = p[d_in], .m = m, .n = n, .k = k};
      args.transpose_b = true;
      args.ab_type = args.c_type = type;
      EXPECT_TRUE(ops->MatmulGeluBackward(args, p[x]).ok());
    });
  }
}

TEST_P(GpuOps, RopeIsTheCpusAndItsInverseTurnsBack) {
  const DType type = GetParam();
  constexpr int64_t kBatch = 3, kSeq = 37, kHeads = 5;
  for (const int64_t dim : {2, 64, 80, 128}) {
    const int64_t ld = kHeads * dim + 2 * dim;  // beside other heads, which stay
    std::vector<float> frequencies;
    for (int64_t i = 0; i < dim / 2; ++i)
      frequencies.push_back(
          std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(dim)));
    for (const bool inverse : {false, true}) {
      Arrays arrays;
      const int x = arrays.InOut(TypedValues::Random(kBatch * kSeq * ld, type, 51), Close(type));
      Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
        ops->Rope(p[x], ld, kBatch, kSeq, kHeads, dim, frequencies.data(), 1000, inverse, type);
      });
    }
  }
}

TEST_P(GpuOps, DropoutHasTheCpusMask) {
  const DType type = GetParam();
  for (const int64_t per_sample : {1, 255, 7001}) {
    const DropoutArgs args{.rate = 0.3f, .seed = 5, .step = 9, .site = 2, .first_sample = 1003};
    Arrays arrays;
    const int x = arrays.In(TypedValues::Random(3 * per_sample, type, 61));
    const int y = arrays.Out(3 * per_sample, type, kSameBits);
    const int in_place = arrays.InOut(TypedValues::Random(3 * per_sample, type, 62), kSameBits);
    Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
      ops->Dropout(args, p[x], 3, per_sample, type, p[y]);
      ops->Dropout(args, p[in_place], 3, per_sample, type, p[in_place]);
    });
  }
}

TEST_P(GpuOps, DropoutOfAPartHasTheCpusMask) {
  const DType type = GetParam();
  constexpr int64_t kPerSample = 2048;
  for (const int64_t first : {int64_t{4096}, int64_t{3}, int64_t{1} << 34}) {
    SCOPED_TRACE(first);
    const DropoutArgs args{.rate = 0.3f, .seed = 5, .step = 9, .site = 2, .first_element = first};
    Arrays arrays;
    const int x = arrays.In(TypedValues::Random(3 * kPerSample, type, 63));
    const int y = arrays.Out(3 * kPerSample, type, kSameBits);
    Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
      ops->Dropout(args, p[x], 3, kPerSample, type, p[y]);
    });
  }
}

TEST_P(GpuOps, ElementwiseHasTheCpusBits) {
  const DType type = GetParam();
  for (const int64_t n : kCounts) {
    SCOPED_TRACE(n);
    for (const DType other : kTypes) {
      Arrays arrays;
      const int a = arrays.In(TypedValues::Random(n, type, 71, 100));
      const int b = arrays.In(TypedValues::Random(n, type, 72));
      const int sum = arrays.Out(n, type, kSameBits);
      const int added = arrays.InOut(TypedValues::Random(n, type, 73), kSameBits);
      const int converted = arrays.Out(n, other, kSameBits);
      const int fresh = arrays.Out(n, DType::kF32, kSameBits);
      const int more = arrays.InOut(TypedValues::Random(n, DType::kF32, 74), kSameBits);
      const int rounded = arrays.InOut(TypedValues::Random(n, DType::kF32, 75), kSameBits);
      const int gradient = arrays.InOut(TypedValues::Random(n, other, 76), kSameBits);
      Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
        ops->Add(p[a], p[b], n, type, p[sum]);
        ops->Add(p[added], p[a], n, type, p[added]);
        ops->Convert(p[a], type, n, p[converted], other);
        ops->AccumulateF32(p[a], type, n, false, static_cast<float*>(p[fresh]));
        ops->AccumulateF32(p[a], type, n, true, static_cast<float*>(p[more]));
        ops->RoundInPlace(static_cast<float*>(p[rounded]), n, type);
        ops->AddRounded(p[b], type, n, type == DType::kF32 ? DType::kBF16 : type, p[gradient],
                        other);
      });
    }
  }
}

// All halves that are numbers or infinite, and of every two neighbours the middle and what lies
// beside it; 65520 is the first number that becomes infinite.
TEST_P(GpuOps, ConversionsOfFp16HaveTheCpusBits) {
  std::vector<uint16_t> halves;
  std::vector<float> borders;
  for (uint16_t bits = 0; bits <= 0x7C00; ++bits) {
    for (const uint16_t sign : {0x0000, 0x8000}) halves.push_back(bits | sign);
  }
  TypedValues of_halves(static_cast<int64_t>(halves.size()), DType::kF16);
  std::memcpy(of_halves.data(), halves.data(), halves.size() * sizeof(uint16_t));
  for (int64_t i = 0; i + 2 < of_halves.count(); ++i) {
    const auto low = static_cast<float>(of_halves[i]);
    const auto high = i + 4 < of_halves.count() ? static_cast<float>(of_halves[i + 2])
                                                : std::copysign(65536.0f, low);
    const float middle = low + (high - low) / 2;
    for (const float value : {std::nextafter(low, high), std::nextafter(middle, low), middle,
                              std::nextafter(middle, high), std::nextafter(high, low)})
      borders.push_back(value);
  }
  TypedValues of_borders(static_cast<int64_t>(borders.size()), DType::kF32);
  std::memcpy(of_borders.data(), borders.data(), borders.size() * sizeof(float));
  Arrays arrays;
  const int narrow = arrays.In(of_halves), wide = arrays.In(of_borders);
  const int converted = arrays.Out(of_halves.count(), GetParam(), kSameBits);
  const int rounded = arrays.Out(of_borders.count(), DType::kF16, kSameBits);
  Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
    ops->Convert(p[narrow], DType::kF16, of_halves.count(), p[converted], GetParam());
    ops->Convert(p[wide], DType::kF32, of_borders.count(), p[rounded], DType::kF16);
  });
}

TEST_P(GpuOps, CrossEntropyIsTheCpus) {
  const DType type = GetParam();
  for (const auto& [rows, v] : {Matrix{1, 2}, {3, 17}, {65, 1021}, {200, 50257}}) {
    SCOPED_TRACE(testing::Message() << rows << " of " << v);
    std::vector<int32_t> targets;
    for (int64_t i = 0; i < rows; ++i)
      targets.push_back(i % 5 == 4 ? -1 : static_cast<int32_t>((i * 7919) % v));
    for (const float gradient : {0.0f, 1.0f, 2048.0f}) {
      Arrays arrays;
      const int logits = arrays.InOut(TypedValues::Random(v * rows, type, 81, 4),
                                      gradient != 0 ? Close(type) : kSameBits);
      const int target = arrays.In(targets);
      const int losses = arrays.Out(rows, DType::kF32, 4e-6);
      const int sum = arrays.InOut(std::vector<double>{1.5});
      const auto fixed = TypedValues::Random(rows, DType::kF32, 82);
      const int given = arrays.In(fixed);
      Compare(arrays, [&, rows = rows, v = v](Ops* ops, const std::vector<void*>& p) {
        const auto* wanted = static_cast<const int32_t*>(p[target]);
        ops->CrossEntropyColumns(p[logits], wanted, rows, v, type, gradient,
                                 static_cast<float*>(p[losses]));
        ops->AddLosses(static_cast<const float*>(p[given]), wanted, rows,
                       static_cast<double*>(p[sum]));
      });
    }
  }
}

// Of the second of two ranks, which has the rows [v/2, v); the first one's part is made up.
TEST_P(GpuOps, CrossEntropyOfASplitVocabularyIsTheCpus) {
  const DType type = GetParam();
  for (const auto& [rows, v] : {Matrix{1, 2}, {3, 17}, {65, 1021}, {200, 50257}}) {
    SCOPED_TRACE(testing::Message() << rows << " of " << v);
    const int64_t begin = v / 2, own = v - begin;
    std::vector<int32_t> targets;
    for (int64_t i = 0; i < rows; ++i)
      targets.push_back(i % 5 == 4 ? -1 : static_cast<int32_t>((i * 7919) % v));
    TypedValues others(3 * rows, DType::kF32);
    for (int64_t i = 0; i < rows; ++i) {
      others.Set(i, 1.5f + static_cast<float>(i % 7));
      others.Set(rows + i, 1.0f + static_cast<float>(i % 3));
      const int32_t target = targets[static_cast<size_t>(i)];
      others.Set(2 * rows + i, target >= 0 && target < begin ? 0.5f : 0.0f);
    }
    for (const float gradient : {0.0f, 2048.0f}) {
      Arrays arrays;
      const int logits = arrays.InOut(TypedValues::Random(own * rows, type, 83, 4),
                                      gradient != 0 ? Close(type) : kSameBits);
      const int target = arrays.In(targets);
      const int other = arrays.In(others);
      const int local = arrays.Out(rows, DType::kI32, kSameBits);
      const int part = arrays.Out(3 * rows, DType::kF32, 4e-6);
      const int parts = arrays.Out(6 * rows, DType::kF32, 4e-6);
      const int losses = arrays.Out(rows, DType::kF32, 4e-6);
      Compare(arrays, [&, rows = rows, v = v](Ops* ops, const std::vector<void*>& p) {
        const auto* wanted = static_cast<const int32_t*>(p[target]);
        auto* mine = static_cast<int32_t*>(p[local]);
        auto* all = static_cast<float*>(p[parts]);
        const size_t bytes = static_cast<size_t>(3 * rows) * sizeof(float);
        EXPECT_TRUE(ops->LocalIds(wanted, rows, begin, v, mine).ok());
        EXPECT_TRUE(
            ops->SoftmaxPart(p[logits], mine, rows, own, type, static_cast<float*>(p[part])).ok());
        ops->Copy(all, p[other], bytes);
        ops->Copy(all + 3 * rows, p[part], bytes);
        EXPECT_TRUE(ops->CrossEntropyOfParts(all, 2, p[logits], wanted, mine, rows, own, type,
                                             gradient, static_cast<float*>(p[losses]))
                        .ok());
      });
    }
  }
}

TEST_P(GpuOps, ARankWhoseRowsAreAllPaddingHasNoPart) {
  constexpr int64_t kRows = 5;
  Arrays arrays;
  const int none = arrays.In(std::vector<int32_t>(kRows, -1));
  const int part = arrays.Out(3 * kRows, DType::kF32, kSameBits);
  Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
    EXPECT_TRUE(ops->SoftmaxPart(nullptr, static_cast<const int32_t*>(p[none]), kRows, 0,
                                 GetParam(), static_cast<float*>(p[part]))
                    .ok());
  });
}

TEST_P(GpuOps, AdamWHasTheCpusBits) {
  const DType type = GetParam();
  for (const int64_t n : kCounts) {
    for (const DType param_type : kTypes) {
      for (const int64_t t : {1, 1000}) {
        Arrays arrays;
        const int grad = arrays.In(TypedValues::Random(n, type, 91, 50));
        const int master = arrays.InOut(TypedValues::Random(n, DType::kF32, 92), kSameBits);
        const int m = arrays.InOut(TypedValues::Random(n, DType::kF32, 93, 1e-3f), kSameBits);
        TypedValues squares(n, DType::kF32);
        for (int64_t i = 0; i < n; ++i) squares.Set(i, 1e-6f * static_cast<float>(i % 97));
        const int v = arrays.InOut(squares, kSameBits);
        const int param = arrays.Out(n, param_type, kSameBits);
        const AdamWArgs args{.learning_rate = 3e-4f,
                             .beta2 = 0.95f,
                             .weight_decay = 0.1f,
                             .grad_scale = 1.0f / 4096,
                             .t = t};
        Compare(arrays, [&](Ops* ops, const std::vector<void*>& p) {
          ops->AdamW(args, n, p[grad], type, static_cast<float*>(p[master]),
                     static_cast<float*>(p[m]), static_cast<float*>(p[v]), p[param], param_type);
        });
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard
