// What the CUDA backend's calls say of arguments and devices that cannot be. No GPU is needed.
#include <cuda_runtime_api.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/device.h"
#include "worker/ops/cuda/attention.h"
#include "worker/ops/cuda/cuda_ops.h"
#include "worker/ops/cuda/matmul.h"

namespace zeroshard::cuda {
namespace {

using ::testing::HasSubstr;

bool HasGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

TEST(CudaOpsErrors, NameTheDeviceThatIsNoGpu) {
  const auto device = MakeCpuDevice();
  const absl::Status status = MakeCudaOps(device.get()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("\"cpu\""));
}

TEST(CudaOpsErrors, SayWhyTheLibraryHasNoGpu) {
  if (HasGpu()) GTEST_SKIP() << "this machine has a GPU";
  const absl::Status status = MatmulLibrary::Create(false).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(status.message(), HasSubstr("CUBLAS_STATUS_NOT_INITIALIZED"));
  EXPECT_THAT(status.message(), HasSubstr("nvidia-smi"));
}

AttentionArgs Attention(int64_t heads, int64_t head_dim) {
  AttentionArgs args;
  args.batch = args.seq = 4;
  args.heads = args.kv_heads = heads;
  args.head_dim = head_dim;
  args.ld_q = args.ld_k = args.ld_v = heads * head_dim;
  return args;
}

TEST(CudaOpsErrors, NameHeadsThatAreTooLarge) {
  for (const absl::Status& status :
       {AttentionForward(nullptr, Attention(2, 257), nullptr, nullptr),
        AttentionBackward(nullptr, Attention(2, 257), nullptr, nullptr, nullptr, nullptr, nullptr,
                          nullptr, nullptr),
        CachedAttention(nullptr, {.rows = 1, .heads = 2, .kv_heads = 2, .head_dim = 257},
                        nullptr)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("257"));
    EXPECT_THAT(status.message(), HasSubstr("256"));
  }
}

TEST(CudaOpsErrors, NameALaunchThatIsTooLarge) {
  AttentionArgs args = Attention(1024, 64);
  args.batch = args.seq = 1 << 20;
  const absl::Status status = AttentionForward(nullptr, args, nullptr, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("smaller micro-batch"));
}

TEST(CudaOpsErrors, DoNotReadDocumentStartsOnTheHost) {
  AttentionArgs args = Attention(2, 64);
  args.batch = 0;  // nothing is launched, all is checked
  args.document_start = reinterpret_cast<const int32_t*>(4096);
  EXPECT_TRUE(AttentionForward(nullptr, args, nullptr, nullptr).ok());
}

TEST(CudaOpsErrors, AreNoneForNoWork) {
  AttentionArgs args = Attention(2, 64);
  args.seq = 0;
  EXPECT_TRUE(AttentionForward(nullptr, args, nullptr, nullptr).ok());
  EXPECT_TRUE(AttentionBackward(nullptr, args, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                nullptr)
                  .ok());
  EXPECT_TRUE(
      CachedAttention(nullptr, {.past = 3, .heads = 2, .kv_heads = 2, .head_dim = 8}, nullptr)
          .ok());
}

}  // namespace
}  // namespace zeroshard::cuda
