#include "common/bulk/transport/frame_buffer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"

namespace zeroshard::bulk {
namespace {

// An error's text travels in a frame and, cut, in the call's status.
constexpr size_t kMostText = 4096;

void LetGo(void* keep) { delete static_cast<std::shared_ptr<const void>*>(keep); }

grpc::Slice HeaderSlice(const Header& header) {
  char bytes[kHeaderBytes];
  Encode(header, bytes);
  return grpc::Slice(bytes, sizeof(bytes));
}

}  // namespace

grpc::ByteBuffer MakeFrame(Header header, absl::Span<const char> payload,
                           std::shared_ptr<const void> keep) {
  header.bytes = static_cast<uint32_t>(payload.size());
  grpc::Slice slices[2] = {HeaderSlice(header), grpc::Slice()};
  if (payload.empty()) return grpc::ByteBuffer(slices, 1);
  slices[1] = grpc::Slice(const_cast<char*>(payload.data()), payload.size(), LetGo,
                          new std::shared_ptr<const void>(std::move(keep)));
  return grpc::ByteBuffer(slices, 2);
}

grpc::ByteBuffer MakeFrame(Header header, const std::string& payload) {
  header.bytes = static_cast<uint32_t>(payload.size());
  header.payload_crc = Crc32c(payload.data(), payload.size());
  const grpc::Slice slices[2] = {HeaderSlice(header), grpc::Slice(payload)};
  return grpc::ByteBuffer(slices, payload.empty() ? 1 : 2);
}

grpc::ByteBuffer MakeSlotFrame(const Header& header) {
  const grpc::Slice slice = HeaderSlice(header);
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer MakeErrorFrame(const absl::Status& status) {
  Header header;
  header.type = FrameType::kError;
  header.code = static_cast<uint32_t>(status.code());
  return MakeFrame(header, std::string(status.message().substr(0, kMostText)));
}

std::string ReceivedFrame::Text() const {
  std::string text;
  for (const auto& part : parts) text.append(part.data(), part.size());
  return text;
}

absl::StatusOr<ReceivedFrame> ReadFrame(const grpc::ByteBuffer& message, SharedRegion* region) {
  ReceivedFrame frame;
  if (!message.Dump(&frame.slices).ok()) {
    return absl::InternalError("gRPC cannot give out a message that it received");
  }
  size_t total = 0;
  for (const grpc::Slice& slice : frame.slices) total += slice.size();
  char head[kHeaderBytes];
  size_t got = 0;
  for (const grpc::Slice& slice : frame.slices) {
    const size_t n = std::min(slice.size(), kHeaderBytes - got);
    if (n > 0) std::memcpy(head + got, slice.begin(), n);
    got += n;
    if (n < slice.size()) {
      frame.parts.emplace_back(reinterpret_cast<const char*>(slice.begin()) + n, slice.size() - n);
    }
  }
  auto header = Decode(absl::string_view(head, got), total);
  if (!header.ok()) return header.status();
  frame.header = *header;
  if (header->slot != 0) {
    const int slot = header->slot - 1;
    if (region == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("a bulk frame in slot ", slot, " of a stream that has no region"));
    }
    auto claim = region->ClaimSlot(slot);
    if (!claim.ok()) return claim.status();
    frame.claim = *std::move(claim);
    frame.parts.emplace_back(region->Slot(slot), header->bytes);
  }
  if (absl::Status status = CheckPayload(frame.header, ChecksumOf(frame.parts)); !status.ok()) {
    return status;
  }
  return frame;
}

absl::Status ErrorOf(const ReceivedFrame& frame) {
  const auto code = static_cast<absl::StatusCode>(frame.header.code);
  return absl::Status(code == absl::StatusCode::kOk ? absl::StatusCode::kUnknown : code,
                      frame.Text());
}

uint32_t ChecksumOf(absl::Span<const absl::Span<const char>> parts) {
  uint32_t crc = 0;
  for (const auto& part : parts) crc = ExtendCrc32c(crc, part.data(), part.size());
  return crc;
}

void CopyTo(absl::Span<const absl::Span<const char>> parts, char* out) {
  for (const auto& part : parts) {
    std::memcpy(out, part.data(), part.size());
    out += part.size();
  }
}

}  // namespace zeroshard::bulk
