#include "tests/worker/device/guarded_ops.h"

#include <vector>

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

class GuardedOpsTest : public testing::TestWithParam<uint64_t> {
 protected:
  // Of fp32.
  Buffer Upload(const std::vector<float>& values) {
    absl::StatusOr<Buffer> buffer =
        device_.Allocate(values.size() * sizeof(float), MemoryKind::kActivations);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_TRUE(CopyAndWait(&device_, buffer->data(), values.data(), buffer->bytes()).ok());
    return *std::move(buffer);
  }
  std::vector<float> Download(const Buffer& buffer) {
    std::vector<float> values(buffer.bytes() / sizeof(float));
    EXPECT_TRUE(CopyAndWait(&device_, values.data(), buffer.data(), buffer.bytes()).ok());
    return values;
  }

  GuardedDevice device_{GetParam()};
  GuardedOps ops_{&device_};
};
INSTANTIATE_TEST_SUITE_P(Seeds, GuardedOpsTest, testing::Range<uint64_t>(0, 3));

TEST_P(GuardedOpsTest, CallsAreWorkOfTheComputeStreamInOrder) {
  const std::vector<float> left{1, 2, 3, 4}, right{5, 6, 7, 8}, bias{100, 200};
  const Buffer a = Upload(left), b = Upload(right), plus = Upload(bias), c = Upload(left);
  MatmulArgs args;
  args.a = a.data();
  args.b = b.data();
  args.c = c.data();
  args.bias = plus.data();
  args.m = args.n = args.k = 2;
  EXPECT_TRUE(ops_.Matmul(args).ok());
  ops_.Add(c.data(), a.data(), 4, DType::kF32, c.data());
  EXPECT_EQ(Download(c), (std::vector<float>{120, 224, 146, 254}));
  EXPECT_TRUE(device_.compute()->Record().Wait().ok());
}

TEST_P(GuardedOpsTest, RowSumsAndAnglesAreReached) {
  const std::vector<float> rows{1, 2, 3, 4};
  const std::vector<int32_t> ids{1, 3}, none{-1, -1, -1, -1};
  const Buffer data = Upload(rows), out = Upload(std::vector<float>(8));
  const Buffer sums = Upload(std::vector<float>(4)), touched = Upload({0, 0}), count = Upload({0});
  const Buffer slots = Upload({0, 0, 0, 0}), id = Upload({0, 0});
  device_.compute()->Copy(slots.data(), none.data(), slots.bytes());
  device_.compute()->Copy(id.data(), ids.data(), id.bytes());
  const RowSums row_sums{0,
                         8,
                         2,
                         2,
                         slots.as<int32_t>(),
                         touched.as<int32_t>(),
                         count.as<int32_t>(),
                         sums.as<float>()};
  ops_.FoldRows(row_sums, id.as<int32_t>(), data.data(), 2, DType::kF32);
  ops_.JoinRows(row_sums, DType::kF32, out.data(), DType::kF32);
  EXPECT_EQ(Download(out), (std::vector<float>{0, 0, 1, 2, 0, 0, 3, 4}));
  {
    const std::vector<float> angles{0};  // gone when the work is done
    ops_.Rope(data.data(), 2, 1, 2, 1, 2, angles.data(), 0, false, DType::kF32);
  }
  EXPECT_EQ(Download(data), rows) << "turned by nothing";
}

using GuardedOpsDeathTest = GuardedOpsTest;
INSTANTIATE_TEST_SUITE_P(Seeds, GuardedOpsDeathTest, testing::Values<uint64_t>(0));

TEST_P(GuardedOpsDeathTest, HostMemoryIsRefused) {
  const Buffer a = Upload({1, 2});
  std::vector<float> host(2);
  EXPECT_DEATH(ops_.Add(a.data(), host.data(), 2, DType::kF32, a.data()),
               "is no memory of this device");
}

}  // namespace
}  // namespace zeroshard
