#include "common/checksum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace zeroshard {
namespace {

// RFC 3720, appendix B.4, and the check value of the catalogues of CRCs.
TEST(Checksum, IsCrc32c) {
  std::string bytes(32, '\0');
  EXPECT_EQ(Crc32c(bytes.data(), bytes.size()), 0x8a9136aau);
  std::fill(bytes.begin(), bytes.end(), '\xff');
  EXPECT_EQ(Crc32c(bytes.data(), bytes.size()), 0x62a8ab43u);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<char>(i);
  EXPECT_EQ(Crc32c(bytes.data(), bytes.size()), 0x46dd794eu);
  std::reverse(bytes.begin(), bytes.end());
  EXPECT_EQ(Crc32c(bytes.data(), bytes.size()), 0x113fdb5cu);
  EXPECT_EQ(Crc32c("123456789", 9), 0xe3069283u);
  EXPECT_EQ(Crc32c(nullptr, 0), 0u);
}

TEST(Checksum, OfPartsIsThatOfTheWhole) {
  std::string bytes(1000, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 37 + i / 256);
  const uint32_t whole = Crc32c(bytes.data(), bytes.size());
  for (const size_t cut : {0, 1, 7, 64, 999, 1000}) {
    EXPECT_EQ(ExtendCrc32c(Crc32c(bytes.data(), cut), bytes.data() + cut, bytes.size() - cut),
              whole);
  }
}

}  // namespace
}  // namespace zeroshard
