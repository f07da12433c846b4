#include "shard_store/nvme/chunk_layout.h"

#include <gmock/gmock.h>

#include "tests/shard_store/nvme/chunk_file_fixture.h"

namespace zeroshard::nvme {
namespace {

using ::testing::ElementsAre;

TEST(ChunkLayout, SectionsAndBlocksLieWhereTheFormatSaysAtMultiplesOf4096) {
  // One element: a block of 4096 bytes and a label each. 2^18 + 1 elements: a block of 1 MiB and
  // one of 4096 bytes, in 16 bits one of 512 KiB.
  const auto layout = ChunkLayout::Make({{3, Trained(1)}, {7, Trained(kBlockElements + 1)}}, 2);
  ASSERT_TRUE(layout.ok()) << layout.status();
  const auto* one = layout->Find(3);
  const auto* two = layout->Find(7);
  ASSERT_TRUE(one != nullptr && two != nullptr);
  EXPECT_THAT(one->home.section, ElementsAre(4096, 12288, 20480, 28672, 36864));
  const uint64_t fp32 = (1 << 20) + 3 * 4096, half = (1 << 19) + 3 * 4096;
  const uint64_t begin = 36864 + 8192;
  EXPECT_THAT(two->home.section, ElementsAre(begin, begin + fp32, begin + 2 * fp32,
                                             begin + 3 * fp32, begin + 3 * fp32 + half));
  EXPECT_EQ(two->BlockOffset(kMaster, 1), (1u << 20) + 4096);
  EXPECT_EQ(two->PayloadBytes(kMaster, 1), 4u);
  EXPECT_EQ(two->PayloadBytes(kStaging, 0), 1u << 19);
  const uint64_t spare = begin + 3 * fp32 + 2 * half;
  EXPECT_EQ(layout->Spare(1).section[kExpAvg], spare + 4 * fp32);
  EXPECT_EQ(layout->file_bytes(), spare + 6 * fp32);
}

TEST(ChunkLayout, NonsenseIsRefused) {
  ChunkShape odd = Trained(10);
  odd.bytes.master = 39;
  ChunkShape large = Trained(10);
  large.bytes.staging = 80;
  for (const auto& chunks :
       std::vector<std::map<uint32_t, ChunkShape>>{{},
                                                   {{0, ChunkShape{0, {}}}},
                                                   {{0, Trained(kChunkElements + 1)}},
                                                   {{0, odd}},
                                                   {{0, large}}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ChunkLayout::Make(chunks, 0).status()));
  }
}

TEST(ChunkLayout, DamagedHeadersAndLabelsAreToldFromWholeOnes) {
  std::vector<char> page(kHeaderBytes);
  Encode(FileHeader{1, 2, 3, 4, 5, 6, "run", "me"}, page.data());
  ASSERT_TRUE(DecodeHeader(page).ok());
  for (const size_t at : {size_t{0}, size_t{8}, size_t{47}, size_t{176}}) {
    page[at] ^= 1;
    EXPECT_TRUE(absl::IsDataLoss(DecodeHeader(page).status())) << at;
    page[at] ^= 1;
  }
  EXPECT_FALSE(DecodeHeader(absl::MakeConstSpan(page).first(100)).ok());
  Encode(BlockLabel{{1, kStaging, 2}, 3, 4, 5, 6}, page.data());
  ASSERT_TRUE(DecodeLabel(page).ok());
  for (const size_t at : {size_t{0}, size_t{12}, size_t{24}, size_t{44}}) {
    page[at] ^= 1;
    EXPECT_TRUE(absl::IsDataLoss(DecodeLabel(page).status())) << at;
    page[at] ^= 1;
  }
}

}  // namespace
}  // namespace zeroshard::nvme
