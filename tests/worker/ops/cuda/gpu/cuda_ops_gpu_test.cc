// The kernels on a GPU beside the CPU's. Skipped where there is none.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/ops/attention_trial.h"
#include "tests/worker/ops/typed_values.h"
#include "worker/device/cuda/make_cuda_device.h"
#include "worker/ops/cuda/cuda_ops.h"

namespace zeroshard::cuda {
namespace {

using ::testing::HasSubstr;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

class CudaOpsOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (const absl::Status none = CheckCudaDevice(0); !none.ok()) GTEST_SKIP() << none;
    auto device = MakeCudaDevice(0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    auto ops = MakeCudaOps(device_.get());
    ASSERT_TRUE(ops.ok()) << ops.status();
    ops_ = *std::move(ops);
  }
  void TearDown() override { ops_.reset(); }

  Buffer Upload(const void* data, size_t bytes) {
    auto buffer = device_->Allocate(bytes, MemoryKind::kActivations);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_TRUE(CopyAndWait(device_.get(), buffer->data(), data, bytes).ok());
    return *std::move(buffer);
  }
  Buffer Upload(const TypedValues& values) {
    return Upload(values.data(), static_cast<size_t>(values.count()) * SizeOf(values.type()));
  }
  void Download(const Buffer& buffer, void* to) {
    const absl::Status status = CopyAndWait(device_.get(), to, buffer.data(), buffer.bytes());
    ASSERT_TRUE(status.ok()) << status;
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Ops> ops_;
};

TEST_F(CudaOpsOnGpu, ProductsAreTheCpus) {
  const auto cpu = MakeCpuOps(1);
  const int64_t sizes[][3] = {{1, 1, 1},      {3, 5, 7},        {64, 96, 128},
                              {129, 257, 65}, {256, 512, 1024}, {5, 8, 0}};
  for (const auto& [m, n, k] : sizes) {
    for (int flags = 0; flags < 96; ++flags) {
      MatmulArgs args{.m = m, .n = n, .k = k};
      args.transpose_a = (flags & 1) != 0;
      args.transpose_b = (flags & 2) != 0;
      args.accumulate = (flags & 4) != 0;
      args.c_type = (flags & 16) != 0 ? kTypes[flags / 32] : DType::kF32;
      args.ab_type = kTypes[flags / 32];
      const auto a = TypedValues::Random(m * k, args.ab_type, 1);
      const auto b = TypedValues::Random(k * n, args.ab_type, 2);
      const auto bias = TypedValues::Random(n, args.ab_type, 3);
      auto c = TypedValues::Random(m * n, args.c_type, 4);
      const Buffer on_gpu[] = {Upload(a), Upload(b), Upload(bias), Upload(c)};
      MatmulArgs gpu = args;
      gpu.a = on_gpu[0].data();
      gpu.b = on_gpu[1].data();
      gpu.bias = (flags & 8) != 0 ? on_gpu[2].data() : nullptr;
      gpu.c = on_gpu[3].data();
      const absl::Status status = ops_->Matmul(gpu);
      ASSERT_TRUE(status.ok()) << status;
      args.a = a.data();
      args.b = b.data();
      args.bias = (flags & 8) != 0 ? bias.data() : nullptr;
      args.c = c.data();
      ASSERT_TRUE(cpu->Matmul(args).ok());
      TypedValues got(m * n, args.c_type);
      Download(on_gpu[3], got.data());
      EXPECT_LT(RelativeError(got, c.AsDoubles()),
                args.c_type == DType::kF32 ? 1e-5 : 1.02 * RoundingOf(args.c_type))
          << m << " " << n << " " << k << ", flags " << flags;
    }
  }
}

std::vector<int32_t> Documents(int64_t batch, int64_t seq, int64_t length) {
  std::vector<int32_t> starts;
  for (int64_t i = 0; i < batch * seq; ++i) {
    starts.push_back(static_cast<int32_t>(i % seq / length * length));
  }
  return starts;
}

TEST_F(CudaOpsOnGpu, AttentionIsTheCpus) {
  const DropoutArgs drop{.rate = 0.2f, .seed = 9, .step = 3, .site = 1, .first_sample = 70};
  const auto cpu = MakeCpuOps(2);
  for (const Shape& shape :
       {Shape{1, 1, 1, 1, 8, true}, Shape{2, 300, 4, 2, 64, true}, Shape{2, 257, 4, 1, 128, true},
        Shape{1, 513, 2, 2, 32, false}, Shape{2, 200, 2, 2, 80, true, Documents(2, 200, 70)},
        Shape{1, 190, 4, 2, 128, true, Documents(1, 190, 33), drop},
        Shape{2, 150, 2, 1, 64, true, {}, drop}, Shape{1, 100, 3, 3, 7, true},
        Shape{1, 80, 2, 2, 200, true, Documents(1, 80, 33), drop}}) {
    for (const DType type : kTypes) {
      SCOPED_TRACE(ToString(shape) + " " + NameOf(type));
      Trial wanted(shape, type);
      wanted.Forward(cpu.get());
      wanted.Backward(cpu.get());

      std::vector<TypedValues> gradients;
      for (int run = 0; run < 2; ++run) {
        Trial got(shape, type);
        const Buffer qkv = Upload(got.qkv), d_out = Upload(got.d_out), out = Upload(got.out);
        const Buffer lse = Upload(got.lse.data(), got.lse.size() * sizeof(float));
        const Buffer gradient = Upload(got.gradient);
        const Buffer starts = Upload(shape.starts.data(), shape.starts.size() * sizeof(int32_t));
        const Views views(shape);
        const auto at = [&](const Buffer& buffer, const View& view) {
          return buffer.as<char>() + view.base * static_cast<int64_t>(SizeOf(type));
        };
        AttentionArgs args = got.Args();
        args.q = at(qkv, views.q);
        args.k = at(qkv, views.k);
        args.v = at(qkv, views.v);
        if (!shape.starts.empty()) args.document_start = starts.as<int32_t>();
        absl::Status status = ops_->AttentionForward(args, out.data(), lse.as<float>());
        ASSERT_TRUE(status.ok()) << status;
        status = ops_->AttentionBackward(args, out.data(), d_out.data(), lse.as<float>(),
                                         at(gradient, views.q), at(gradient, views.k),
                                         at(gradient, views.v));
        ASSERT_TRUE(status.ok()) << status;
        Download(out, got.out.data());
        Download(lse, got.lse.data());
        Download(gradient, got.gradient.data());
        const double rounding = type == DType::kF32 ? 0 : RoundingOf(type);
        EXPECT_LT(RelativeError(got.out, wanted.out.AsDoubles()), 1.54 * rounding + 2e-6);
        EXPECT_LT(RelativeError(got.gradient, wanted.gradient.AsDoubles()), 2.56 * rounding + 4e-6);
        for (size_t i = 0; i < got.lse.size(); ++i) {
          ASSERT_NEAR(got.lse[i], wanted.lse[i], 2e-5 * (1 + std::abs(wanted.lse[i]))) << i;
        }
        gradients.push_back(got.gradient);
      }
      EXPECT_TRUE(gradients[0] == gradients[1]);  // the same bits again
    }
  }
}

TEST_F(CudaOpsOnGpu, CachedAttentionIsTheCpus) {
  const auto cpu = MakeCpuOps(1);
  for (const DType type : kTypes) {
    CachedAttentionArgs args{
        .past = 300, .rows = 5, .heads = 4, .kv_heads = 2, .head_dim = 72, .dtype = type};
    const auto q = TypedValues::Random(5 * 4 * 72, type, 1, 2);
    const auto k = TypedValues::Random(305 * 2 * 72, type, 2, 2);
    const auto v = TypedValues::Random(305 * 2 * 72, type, 3);
    TypedValues wanted(q.count(), type), got(q.count(), type);
    const Buffer on_gpu[] = {Upload(q), Upload(k), Upload(v), Upload(got)};
    args.q = q.data(), args.k = k.data(), args.v = v.data();
    ASSERT_TRUE(cpu->CachedAttention(args, wanted.data()).ok());
    args.q = on_gpu[0].data(), args.k = on_gpu[1].data(), args.v = on_gpu[2].data();
    ASSERT_TRUE(ops_->CachedAttention(args, on_gpu[3].data()).ok());
    Download(on_gpu[3], got.data());
    EXPECT_LT(RelativeError(got, wanted.AsDoubles()),
              type == DType::kF32 ? 1e-6 : 0.77 * RoundingOf(type));
  }
}

TEST_F(CudaOpsOnGpu, RopeKeepsTablesOfSeveralFrequencies) {
  const auto cpu = MakeCpuOps(1);
  constexpr int64_t kSeq = 50, kDim = 64;
  for (int round = 0; round < 2; ++round) {
    for (const int64_t first : {0, 4000}) {
      for (const float base : {10000.0f, 500000.0f}) {
        std::vector<float> frequencies;
        for (int64_t i = 0; i < kDim / 2; ++i) {
          frequencies.push_back(std::pow(base, -2.0f * static_cast<float>(i) / kDim));
        }
        auto x = TypedValues::Random(kSeq * kDim, DType::kF32, 5);
        const Buffer on_gpu = Upload(x);
        cpu->Rope(x.data(), kDim, 1, kSeq, 1, kDim, frequencies.data(), first, false, DType::kF32);
        ops_->Rope(on_gpu.data(), kDim, 1, kSeq, 1, kDim, frequencies.data(), first, false,
                   DType::kF32);
        TypedValues got(x.count(), DType::kF32);
        Download(on_gpu, got.data());
        EXPECT_LT(RelativeError(got, x.AsDoubles()), 1e-6);
      }
    }
  }
}

TEST_F(CudaOpsOnGpu, CopiesZerosAndRows) {
  const std::vector<int32_t> values = {1, 2, 3, 4, 5, 6, 7, 8};
  const Buffer from = Upload(values.data(), 32), to = Upload(values.data(), 32);
  ops_->Zero(to.data(), 32);
  ops_->CopyRows(to.data(), 8, from.data(), 16, 2, 4);  // the first of four, into the first of two
  ops_->Copy(to.as<char>() + 16, from.as<char>() + 16, 8);
  std::vector<int32_t> got(8);
  Download(to, got.data());
  EXPECT_EQ(got, (std::vector<int32_t>{1, 0, 5, 0, 5, 6, 0, 0}));
}

TEST_F(CudaOpsOnGpu, AnErrorWithoutAStatusStays) {
  const Buffer x = Upload(std::vector<float>(8).data(), 32);
  ops_->GeluForward(x.data(), 8, DType::kI32, x.data());
  EXPECT_THAT(device_->compute()->Record().Wait().message(), HasSubstr("int32"));
  MatmulArgs args{.m = 1, .n = 1, .k = 1};
  args.a = args.b = x.data();
  args.c = x.data();
  EXPECT_THAT(ops_->Matmul(args).message(), HasSubstr("int32"));
  ops_->GeluForward(x.data(), 8, DType::kF32, x.data());
  EXPECT_THAT(device_->compute()->Record().Wait().message(), HasSubstr("int32"));
}

TEST_F(CudaOpsOnGpu, TheFingerprintNamesWhatRoundingDependsOn) {
  const std::string fingerprint = ops_->Fingerprint();
  EXPECT_THAT(fingerprint, HasSubstr("cuda NVIDIA"));
  EXPECT_THAT(fingerprint, HasSubstr(" sm_"));
  EXPECT_THAT(fingerprint, HasSubstr(" cublaslt "));
  EXPECT_EQ(fingerprint.find("tf32"), std::string::npos);
  auto rounded = MakeCudaOps(device_.get(), true);
  ASSERT_TRUE(rounded.ok()) << rounded.status();
  EXPECT_EQ((*rounded)->Fingerprint(), fingerprint + " tf32");
}

}  // namespace
}  // namespace zeroshard::cuda
