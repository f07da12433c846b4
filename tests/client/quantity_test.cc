#include "client/quantity.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(ParseBytes, TakesDecimalAndBinaryUnits) {
  EXPECT_EQ(*ParseBytes("80GB"), 80'000'000'000u);
  EXPECT_EQ(*ParseBytes("80GiB"), 80ull << 30);
  EXPECT_EQ(*ParseBytes("80 gib"), 80ull << 30);
  EXPECT_EQ(*ParseBytes("1.5TB"), 1'500'000'000'000u);
  EXPECT_EQ(*ParseBytes("512"), 512u);
  EXPECT_EQ(*ParseBytes("512k"), 512'000u);
  EXPECT_EQ(*ParseBytes("2Ti"), 2ull << 40);
  EXPECT_EQ(*ParseBytes("0"), 0u);
  EXPECT_EQ(*ParseBytes("1e3 MB"), 1'000'000'000u);
}

TEST(ParseBytes, RefusesWhatIsNoSizeWithWhatWasSeen) {
  for (const char* text : {"", "GB", "-1GB", "80XB", "80GBs", "eighty", "1e30", "80 G B", "nan",
                           "1..2GB", "0x10", "inf"}) {
    const auto parsed = ParseBytes(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_THAT(std::string(parsed.status().message()),
                AllOf(HasSubstr(text), HasSubstr("wanted a size such as 80GB")));
  }
  EXPECT_THAT(std::string(ParseBytes("80Gbit").status().message()), HasSubstr("not bits"));
}

TEST(ParseSpeed, TakesBitsAndBytes) {
  EXPECT_EQ(*ParseSpeed("400Gbit"), 50e9);
  EXPECT_EQ(*ParseSpeed("400 Gbit/s"), 50e9);
  EXPECT_EQ(*ParseSpeed("400Gbps"), 50e9);
  EXPECT_EQ(*ParseSpeed("50GB"), 50e9);
  EXPECT_EQ(*ParseSpeed("50 GB/s"), 50e9);
  EXPECT_EQ(*ParseSpeed("1GiB"), 1073741824.0);
  for (const char* text :
       {"", "400", "400G", "400Gbits", "-4Gbit", "fast", "400Gb", "400gb/s", "400 gib"}) {
    EXPECT_FALSE(ParseSpeed(text).ok()) << text;
  }
}

TEST(ParseCount, TakesModelsAndOperations) {
  EXPECT_EQ(*ParseCount("7.5B"), 7.5e9);
  EXPECT_EQ(*ParseCount("124M"), 124e6);
  EXPECT_EQ(*ParseCount("2T"), 2e12);
  EXPECT_EQ(*ParseCount("2t"), 2e12);
  EXPECT_EQ(*ParseCount("350k"), 350e3);
  EXPECT_EQ(*ParseCount("1e9"), 1e9);
  EXPECT_EQ(*ParseCount("989T"), 989e12);
  for (const char* text : {"", "B", "7.5Q", "7,5B", "-1B", "seven"}) {
    EXPECT_FALSE(ParseCount(text).ok()) << text;
  }
}

}  // namespace
}  // namespace zeroshard
