// How much of a store's --memory-limit is training state's.
#include "shard_store/process_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace zeroshard::store {
namespace {

using testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

TEST(ProcessMemoryTest, WhatTheProcessTakesItselfIsNotOfferedToJobs) {
  // 20 at the start, 24 to serve, four writers of 4, four threads of a half: 62.
  const auto bytes = StateBytes(100 * kMiB, 20 * kMiB, 4);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(*bytes, 38 * kMiB);
  EXPECT_EQ(*StateBytes(62 * kMiB + 1, 20 * kMiB, 4), 1u);
}

TEST(ProcessMemoryTest, ALimitThatTheProcessTakesAloneIsRefusedWithTheNumbers) {
  for (const uint64_t limit : {uint64_t{1}, 62 * kMiB}) {
    const absl::Status status = StateBytes(limit, 20 * kMiB, 4).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(HasSubstr(absl::StrCat("--memory-limit ", limit)),
                               HasSubstr(absl::StrCat(62 * kMiB)),
                               HasSubstr(absl::StrCat(20 * kMiB, " at its start"))));
  }
}

TEST(ProcessMemoryTest, ResidentMemoryGrowsWithWhatIsTouched) {
  const uint64_t before = ResidentBytes();
  EXPECT_GT(before, 0u);
  constexpr size_t kBytes = 32 << 20;
  void* touched = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(touched, MAP_FAILED);
  std::memset(touched, 1, kBytes);
  EXPECT_GE(ResidentBytes(), before + kBytes / 2);
  munmap(touched, kBytes);
}

}  // namespace
}  // namespace zeroshard::store
