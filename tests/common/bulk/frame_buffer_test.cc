// Frames in gRPC's buffers: nothing is copied on the way out, however the bytes arrive they are
// read, and damage is seen.
#include "common/bulk/transport/frame_buffer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "common/checksum.h"
#include "tests/common/temp_folder.h"

namespace zeroshard::bulk {
namespace {

using ::testing::HasSubstr;

Header Push(const std::string& payload) {
  Header header;
  header.type = FrameType::kPush;
  header.dtype = DType::kU8;
  header.count = static_cast<uint32_t>(payload.size());
  header.payload_crc = Crc32c(payload.data(), payload.size());
  return header;
}

std::string Flat(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string flat;
  for (const auto& slice : slices) {
    flat.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return flat;
}

// The same bytes in slices of `size`.
grpc::ByteBuffer Cut(const std::string& flat, size_t size) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < flat.size(); at += size) slices.emplace_back(flat.substr(at, size));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

TEST(FrameBufferTest, ThePayloadIsNotCopiedAndIsHeldUntilTheBufferGoes) {
  auto payload = std::make_shared<const std::string>(100000, 'p');
  std::weak_ptr<const std::string> held = payload;
  {
    const grpc::ByteBuffer buffer = MakeFrame(Push(*payload), *payload, payload);
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 2u);
    EXPECT_EQ(reinterpret_cast<const char*>(slices[1].begin()), payload->data());
    payload.reset();
    EXPECT_FALSE(held.expired());
  }
  EXPECT_TRUE(held.expired());
}

TEST(FrameBufferTest, AFrameIsReadHoweverItIsCut) {
  std::string payload(1000, '\0');
  std::iota(payload.begin(), payload.end(), '\1');
  const std::string flat = Flat(MakeFrame(Push(payload), payload, nullptr));
  for (const size_t size :
       {size_t{1}, size_t{7}, size_t{63}, size_t{64}, size_t{65}, flat.size()}) {
    const auto frame = ReadFrame(Cut(flat, size));
    ASSERT_TRUE(frame.ok()) << frame.status() << " in slices of " << size;
    EXPECT_EQ(frame->Text(), payload);
    std::string copy(payload.size(), '\0');
    CopyTo(frame->parts, copy.data());
    EXPECT_EQ(copy, payload);
  }
}

TEST(FrameBufferTest, AFlippedBitOfThePayloadIsDataLoss) {
  const std::string payload(300, 'x');
  const std::string flat = Flat(MakeFrame(Push(payload), payload, nullptr));
  for (const size_t at : {size_t{64}, size_t{200}, flat.size() - 1}) {
    std::string damaged = flat;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    EXPECT_EQ(ReadFrame(Cut(damaged, 100)).status().code(), absl::StatusCode::kDataLoss);
  }
}

TEST(FrameBufferTest, ACutOrEmptyMessageIsRefused) {
  const std::string payload(300, 'x');
  const std::string flat = Flat(MakeFrame(Push(payload), payload, nullptr));
  for (const size_t size : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, flat.size() - 1}) {
    EXPECT_FALSE(ReadFrame(Cut(flat.substr(0, size), 50)).ok()) << size;
  }
  EXPECT_FALSE(ReadFrame(Cut(flat + "y", 50)).ok());
}

// A payload in a slot of the sender's, as its header and the receiver's region say.
class SlotFrameTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto sender = SharedRegion::Make(2, folder_.path());
    ASSERT_TRUE(sender.ok()) << sender.status();
    sender_ = *sender;
    auto receiver = SharedRegion::Map(sender_->name(), folder_.path());
    ASSERT_TRUE(receiver.ok()) << receiver.status();
    receiver_ = *receiver;
  }
  Header Sent(const std::string& payload) {
    Header header = Push(payload);
    const auto slot = sender_->Take();
    EXPECT_TRUE(slot.has_value());
    header.slot = static_cast<uint16_t>(*slot + 1);
    header.bytes = static_cast<uint32_t>(payload.size());
    EXPECT_EQ(CopyWithCrc32c(payload.data(), payload.size(), sender_->Slot(*slot)),
              header.payload_crc);
    return header;
  }

  TempFolder folder_;
  std::shared_ptr<SharedRegion> sender_, receiver_;
};

TEST_F(SlotFrameTest, APayloadInASlotIsReadThereAndTheSlotIsFreeWhenTheFrameGoes) {
  const std::string payload(100000, 'p');
  const grpc::ByteBuffer message = MakeSlotFrame(Sent(payload));
  EXPECT_EQ(message.Length(), kHeaderBytes);
  {
    const auto frame = ReadFrame(message, receiver_.get());
    ASSERT_TRUE(frame.ok()) << frame.status();
    ASSERT_EQ(frame->parts.size(), 1u);
    EXPECT_EQ(frame->parts[0].data(), receiver_->Slot(0));
    EXPECT_EQ(frame->Text(), payload);
    EXPECT_EQ(sender_->Take(), 1);
    EXPECT_EQ(sender_->Take(), std::nullopt);
  }
  EXPECT_EQ(sender_->Take(), 0);
}

TEST_F(SlotFrameTest, AReleasedFrameHasNoPayloadAnyMore) {
  auto frame = ReadFrame(MakeSlotFrame(Sent("abc")), receiver_.get());
  ASSERT_TRUE(frame.ok()) << frame.status();
  frame->Release();
  EXPECT_TRUE(frame->parts.empty());
  EXPECT_EQ(sender_->Take(), 0);
}

TEST_F(SlotFrameTest, ADamagedSlotIsDataLossAndFree) {
  const Header header = Sent("abc");
  sender_->Slot(0)[1] = 'x';
  EXPECT_EQ(ReadFrame(MakeSlotFrame(header), receiver_.get()).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(sender_->Take(), 0);
}

TEST_F(SlotFrameTest, SlotsThatWereNotSentAreRefusedByName) {
  Header header = Sent("abc");
  EXPECT_THAT(ReadFrame(MakeSlotFrame(header)).status().message(),
              HasSubstr("slot 0 of a stream that has no region"));
  const auto frame = ReadFrame(MakeSlotFrame(header), receiver_.get());
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_THAT(ReadFrame(MakeSlotFrame(header), receiver_.get()).status().message(),
              HasSubstr("slot 0, whose last frame is still being read"));
  header.slot = 2;
  EXPECT_THAT(ReadFrame(MakeSlotFrame(header), receiver_.get()).status().message(),
              HasSubstr("slot 1, which is free"));
  header.slot = 3;
  EXPECT_THAT(ReadFrame(MakeSlotFrame(header), receiver_.get()).status().message(),
              HasSubstr("slot 2 of a region that has 2"));
}

TEST(FrameBufferTest, AnErrorArrivesAsItWas) {
  const auto frame =
      ReadFrame(MakeErrorFrame(absl::FailedPreconditionError("generation 3 is over")));
  ASSERT_TRUE(frame.ok());
  EXPECT_EQ(frame->header.type, FrameType::kError);
  EXPECT_EQ(ErrorOf(*frame), absl::FailedPreconditionError("generation 3 is over"));
}

TEST(FrameBufferTest, AnErrorWithoutACodeIsStillOne) {
  Header header;
  header.type = FrameType::kError;
  const auto frame = ReadFrame(MakeFrame(header, "?"));
  ASSERT_TRUE(frame.ok());
  EXPECT_FALSE(ErrorOf(*frame).ok());
}

}  // namespace
}  // namespace zeroshard::bulk
