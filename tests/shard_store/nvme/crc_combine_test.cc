#include "shard_store/nvme/crc_combine.h"

#include <gtest/gtest.h>

#include "common/checksum.h"
#include "tests/shard_store/nvme/disk_faults.h"

namespace zeroshard::nvme {
namespace {

TEST(CrcCombine, IsTheChecksumOfTheWhole) {
  const std::vector<char> bytes = Bytes(100'003, 1);
  const uint32_t whole = Crc32c(bytes.data(), bytes.size());
  for (const size_t cut : {size_t{0}, size_t{1}, size_t{7}, size_t{4096}, size_t{65'537},
                           bytes.size() - 1, bytes.size()}) {
    EXPECT_EQ(CombineCrc32c(Crc32c(bytes.data(), cut),
                            Crc32c(bytes.data() + cut, bytes.size() - cut), bytes.size() - cut),
              whole)
        << cut;
  }
}

}  // namespace
}  // namespace zeroshard::nvme
