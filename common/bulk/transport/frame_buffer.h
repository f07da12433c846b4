// Frames as gRPC carries them: a ByteBuffer of a header's slice and a slice over the payload, which
// is not copied on its way out, and is read where gRPC received it on its way in.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bulk/frame.h"
#include "common/bulk/shared_region.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"

namespace zeroshard::bulk {

// `payload` must stay as it is for as long as `keep` lives, which gRPC lets go of when it is done
// with the bytes, from any thread. Sets bytes; payload_crc is the caller's. Of a payload without
// bytes nothing is kept.
grpc::ByteBuffer MakeFrame(Header header, absl::Span<const char> payload,
                           std::shared_ptr<const void> keep);
// The payload is copied and its checksum set.
grpc::ByteBuffer MakeFrame(Header header, const std::string& payload);
// A frame whose payload of header.bytes lies in header.slot.
grpc::ByteBuffer MakeSlotFrame(const Header& header);
// A kError frame.
grpc::ByteBuffer MakeErrorFrame(const absl::Status& status);

// Payloads of so few bytes are sent with their header: as cheap, and a slot is for larger ones.
constexpr size_t kLeastShared = size_t{32} << 10;

// Movable alone: `parts` may point into `slices`.
struct ReceivedFrame {
  ReceivedFrame() = default;
  ReceivedFrame(ReceivedFrame&&) = default;
  ReceivedFrame& operator=(ReceivedFrame&&) = default;

  Header header;
  std::vector<grpc::Slice> slices;                        // own the bytes,
  SharedRegion::Claim claim;                              // or this does
  absl::InlinedVector<absl::Span<const char>, 32> parts;  // the payload, in order

  std::string Text() const;  // the payload as a string
  // The payload is done with: its slot is free for the next.
  void Release() {
    if (claim.held()) parts.clear();
    claim.Release();
  }
};

// `region`: of the stream; null where there is none. The errors of Decode, ClaimSlot and
// CheckPayload; INVALID_ARGUMENT: a slot without a region.
absl::StatusOr<ReceivedFrame> ReadFrame(const grpc::ByteBuffer& message,
                                        SharedRegion* region = nullptr);

// What a kError frame says.
absl::Status ErrorOf(const ReceivedFrame& frame);

// CRC-32C of the payload.
uint32_t ChecksumOf(absl::Span<const absl::Span<const char>> parts);
// Copies the payload, which must have as many bytes as `out` has room for.
void CopyTo(absl::Span<const absl::Span<const char>> parts, char* out);

}  // namespace zeroshard::bulk
