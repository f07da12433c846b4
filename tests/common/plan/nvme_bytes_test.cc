#include "common/plan/nvme_bytes.h"

#include <gtest/gtest.h>

namespace zeroshard {
namespace {

TEST(NvmeBytes, ASectionIsBlocksOfWholePagesWithALabelEach) {
  EXPECT_EQ(NvmeSectionBytes(1, 4), 4096u + 4096u);
  EXPECT_EQ(NvmeSectionBytes(1024, 4), 4096u + 4096u);
  EXPECT_EQ(NvmeSectionBytes(1025, 4), 8192u + 4096u);
  EXPECT_EQ(NvmeSectionBytes(1 << 18, 4), (1u << 20) + 4096u);
  EXPECT_EQ(NvmeSectionBytes((1 << 18) + 64, 2), (1u << 19) + 4096u + 4096u + 4096u);
  EXPECT_EQ(NvmeSectionBytes(1 << 20, 4), 4 * ((1u << 20) + 4096u));
  EXPECT_EQ(NvmeSectionBytes(1 << 20, 0), 0u);
}

TEST(NvmeBytes, AChunkIsTheSumOfWhatIsKeptOfIt) {
  const Chunk trained{0, 0, 1 << 20, true}, frozen{0, 0, 1 << 20, false};
  const uint64_t wide = 4 * ((1u << 20) + 4096u), narrow = 4 * ((1u << 19) + 4096u);
  const auto of = [](const Chunk& chunk, DType type, bool sgd) {
    return NvmeBytesOf(chunk.size(), BytesOf(chunk, type, sgd));
  };
  EXPECT_EQ(of(trained, DType::kBF16, false), 3 * wide + 2 * narrow);
  EXPECT_EQ(of(trained, DType::kBF16, true), 2 * wide + 2 * narrow);
  EXPECT_EQ(of(trained, DType::kF32, false), 4 * wide);
  EXPECT_EQ(of(frozen, DType::kBF16, false), narrow);
  EXPECT_EQ(of(frozen, DType::kF32, false), wide);
}

TEST(NvmeBytes, EitherDeviceBringsTheWholeJobToTheDisk) {
  v1::JobSpec spec;
  EXPECT_FALSE(UsesNvme(spec));
  v1::ZeroSpec* zero = spec.mutable_zero_optimization();
  zero->mutable_offload_optimizer()->set_device("cpu");
  EXPECT_FALSE(UsesNvme(spec));
  zero->mutable_offload_param()->set_device("nvme");
  EXPECT_TRUE(UsesNvme(spec));
  zero->mutable_offload_param()->set_device("cpu");
  zero->mutable_offload_optimizer()->set_device("nvme");
  EXPECT_TRUE(UsesNvme(spec));
}

}  // namespace
}  // namespace zeroshard
