// The format of bulk frames: byte by byte as frame.h writes it down, and nothing else is taken.
#include "common/bulk/frame.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/checksum.h"

namespace zeroshard::bulk {
namespace {

using ::testing::HasSubstr;

Header Push() {
  Header header;
  header.type = FrameType::kPush;
  header.dtype = DType::kBF16;
  header.generation = 0x0102030405060708;
  header.epoch = 0x1112131415161718;
  header.step = 0x2122232425262728;
  header.chunk = 0x31323334;
  header.begin = 0x01424344;
  header.count = 0x00000003;
  header.tag = 0x51525354;
  header.bytes = 6;
  header.payload_crc = 0x61626364;
  header.code = 0;
  return header;
}

std::string Bytes(const Header& header) {
  std::string bytes(kHeaderBytes, '\0');
  Encode(header, bytes.data());
  return bytes;
}

absl::StatusOr<Header> DecodeAll(const std::string& header, size_t payload) {
  // A block of its own: a sanitizer sees a read beyond it.
  const std::vector<char> block(header.begin(), header.end());
  return Decode(absl::string_view(block.data(), block.size()), header.size() + payload);
}

// Changed bytes with a right checksum.
std::string Sealed(std::string bytes) {
  const uint32_t crc = Crc32c(bytes.data(), 60);
  for (size_t i = 0; i < 4; ++i) bytes[60 + i] = static_cast<char>(crc >> (8 * i));
  return bytes;
}

TEST(FrameTest, EachFieldIsWhereTheFormatSaysLittleEndian) {
  const std::string bytes = Bytes(Push());
  const std::string wanted = std::string("ZSB1") + "\x03" + std::string("\x01\0\0", 3) +
                             "\x08\x07\x06\x05\x04\x03\x02\x01"
                             "\x18\x17\x16\x15\x14\x13\x12\x11"
                             "\x28\x27\x26\x25\x24\x23\x22\x21"
                             "\x34\x33\x32\x31"
                             "\x44\x43\x42\x01" +
                             std::string("\x03\0\0\0", 4) + "\x54\x53\x52\x51" +
                             std::string("\x06\0\0\0", 4) + "\x64\x63\x62\x61" +
                             std::string("\0\0\0\0", 4);
  ASSERT_EQ(wanted.size(), 60u);
  EXPECT_EQ(bytes.substr(0, 60), wanted);
  EXPECT_EQ(Sealed(bytes), bytes);
}

TEST(FrameTest, WhatIsWrittenIsRead) {
  const auto header = DecodeAll(Bytes(Push()), 6);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->type, FrameType::kPush);
  EXPECT_EQ(header->dtype, DType::kBF16);
  EXPECT_EQ(header->generation, 0x0102030405060708u);
  EXPECT_EQ(header->epoch, 0x1112131415161718u);
  EXPECT_EQ(header->step, 0x2122232425262728u);
  EXPECT_EQ(header->chunk, 0x31323334u);
  EXPECT_EQ(header->begin, 0x01424344u);
  EXPECT_EQ(header->count, 3u);
  EXPECT_EQ(header->tag, 0x51525354u);
  EXPECT_EQ(header->bytes, 6u);
  EXPECT_EQ(header->payload_crc, 0x61626364u);
  EXPECT_EQ(header->code, 0u);
}

TEST(FrameTest, AnyFlippedBitOfTheHeaderIsRefused) {
  const std::string bytes = Bytes(Push());
  for (size_t bit = 0; bit < 8 * kHeaderBytes; ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_FALSE(DecodeAll(flipped, 6).ok()) << "bit " << bit;
  }
}

TEST(FrameTest, AMessageThatIsTooShortIsRefusedWithoutAReadBeyondIt) {
  const std::string bytes = Bytes(Push());
  for (size_t size = 0; size < kHeaderBytes; ++size) {
    EXPECT_EQ(DecodeAll(bytes.substr(0, size), 0).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(FrameTest, AnotherProtocolIsNamed) {
  std::string bytes = Bytes(Push());
  bytes[3] = '2';
  EXPECT_THAT(DecodeAll(Sealed(bytes), 6).status().message(), HasSubstr("another version"));
}

TEST(FrameTest, LengthsMustAgree) {
  const std::string bytes = Bytes(Push());
  EXPECT_FALSE(DecodeAll(bytes, 5).ok());
  EXPECT_FALSE(DecodeAll(bytes, 7).ok());
  EXPECT_TRUE(DecodeAll(bytes, 6).ok());
  Header header = Push();
  header.count = 4;  // of 2 bytes, but there are 6
  EXPECT_THAT(DecodeAll(Bytes(header), 6).status().message(), HasSubstr("4 elements of bf16"));
  header.count = 0xffffffff;  // 2 * count is 6 only where it overflows
  EXPECT_FALSE(DecodeAll(Bytes(header), 6).ok());
}

TEST(FrameTest, TheLongestPayloadIsTakenAndNoLongerOne) {
  Header header = Push();
  header.bytes = kMaxPayload;
  header.count = kMaxPayload / 2;
  EXPECT_TRUE(DecodeAll(Bytes(header), kMaxPayload).ok());
  header.bytes += 2;
  header.count += 1;
  EXPECT_THAT(DecodeAll(Bytes(header), kMaxPayload + 2).status().message(), HasSubstr("1048576"));
}

TEST(FrameTest, ValuesOutsideTheirRangeAreRefused) {
  const auto with = [](size_t at, char value) {
    std::string bytes = Bytes(Push());
    bytes[at] = value;
    return DecodeAll(Sealed(bytes), 6).status();
  };
  EXPECT_FALSE(with(4, 0).ok());
  EXPECT_FALSE(with(4, 10).ok());
  EXPECT_FALSE(with(5, 5).ok());
  EXPECT_FALSE(with(39, 0x41).ok());  // begin above 2^30
  EXPECT_FALSE(with(56, 17).ok());    // no such status code
  EXPECT_TRUE(with(56, 16).ok());
}

TEST(FrameTest, FramesWithoutAPayloadMustHaveNone) {
  for (const FrameType type :
       {FrameType::kRoom, FrameType::kAck, FrameType::kPull, FrameType::kState}) {
    Header header = Push();
    header.type = type;
    EXPECT_FALSE(DecodeAll(Bytes(header), 6).ok());
    header.bytes = 0;
    EXPECT_TRUE(DecodeAll(Bytes(header), 0).ok());
  }
}

TEST(FrameTest, ASlotStandsInBytesSixAndSevenAndTakesThePayloadsPlace) {
  Header header = Push();
  header.slot = kMaxSlot;
  std::string bytes = Bytes(header);
  EXPECT_EQ(bytes[6], static_cast<char>(kMaxSlot));
  EXPECT_EQ(bytes[7], 0);
  const auto decoded = DecodeAll(bytes, 0);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->slot, kMaxSlot);
  EXPECT_EQ(decoded->bytes, 6u);
  EXPECT_THAT(DecodeAll(bytes, 6).status().message(), HasSubstr("lie in a slot"));
}

TEST(FrameTest, ASlotThatNoRegionHasOrWhereNoneBelongsIsRefused) {
  Header header = Push();
  header.slot = kMaxSlot + 1;
  EXPECT_THAT(DecodeAll(Bytes(header), 0).status().message(), HasSubstr("in slot 32"));
  header.slot = 0x0100;
  EXPECT_FALSE(DecodeAll(Bytes(header), 0).ok());
  header.slot = 1;
  header.bytes = header.count = 0;
  EXPECT_FALSE(DecodeAll(Bytes(header), 0).ok());
  for (const FrameType type :
       {FrameType::kHello, FrameType::kWelcome, FrameType::kAck, FrameType::kPull,
        FrameType::kState, FrameType::kError, FrameType::kRoom}) {
    header = Push();
    header.type = type;
    header.slot = 1;
    EXPECT_FALSE(DecodeAll(Bytes(header), 0).ok()) << static_cast<int>(type);
  }
}

TEST(FrameTest, AWrongChecksumOfThePayloadNamesStepAndChunk) {
  Header header = Push();
  header.step = 7;
  header.chunk = 5;
  EXPECT_TRUE(CheckPayload(header, 0x61626364).ok());
  const absl::Status status = CheckPayload(header, 0x61626365);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(status.message(), HasSubstr("step 7, chunk 5"));
}

}  // namespace
}  // namespace zeroshard::bulk
