// The messages of a Bulk stream between a rank (or a store that copies) and a store. Each gRPC
// message is one frame: a header of 64 bytes, little endian, and what it announces:
//
//   offset  bytes  field
//        0      4  magic "ZSB1"
//        4      1  type (FrameType)
//        5      1  element type of the payload (DType as a number), or 0
//        6      2  slot       0: the payload follows; k: it lies in slot k-1 of the stream's region
//        8      8  generation
//       16      8  epoch
//       24      8  step       pushes: the step whose gradient it is; pulls: the version wanted
//       32      4  chunk
//       36      4  begin      elements from the chunk's begin
//       40      4  count      elements
//       44      4  tag        given by the asking side, repeated in the answer
//       48      4  bytes      of the payload
//       52      4  crc32c     of the payload
//       56      4  code       kError, kAck: an absl status code
//       60      4  crc32c     of the 60 bytes before it
//
// A stream begins with kHello (payload: v1::BulkHello), which is answered by kWelcome (payload:
// v1::BulkWelcome). Then the asking side sends kPush, which is
// answered by kAck (many at once: every push up to and including `tag`, in the order sent; OK once
// it is staged), or kPull, which is answered by kData frames that cover its range in order, once
// the chunk has that version. kState asks for fp32 state of a kind and is for stores. kError
// (payload: text) ends the stream. Payloads have at most 1 MiB: larger messages halve gRPC's
// throughput. Where both ends have mapped a region (shared_region.h) the payloads of kPush and
// kData may lie in its slots: then only the header travels. kRoom says that a slot is free again
// which the store waited for. Pure functions, thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/types.h"

namespace zeroshard::bulk {

enum class FrameType : uint8_t {
  kHello = 1,
  kWelcome = 2,  // the store's answer to kHello
  kPush = 3,
  kAck = 4,
  kPull = 5,
  kData = 6,
  kState = 7,  // code: the StateKind wanted; answered by kData of fp32
  kError = 8,
  kRoom = 9,  // from the asking side
};

constexpr size_t kHeaderBytes = 64;
constexpr size_t kMaxPayload = size_t{1} << 20;
constexpr int kMaxSlot = 32;                 // of a region
constexpr uint32_t kMaxElements = 1u << 30;  // of a count, of an offset

struct Header {
  FrameType type = FrameType::kHello;
  DType dtype = DType::kF32;
  uint16_t slot = 0;
  uint64_t generation = 0;
  uint64_t epoch = 0;
  uint64_t step = 0;
  uint32_t chunk = 0;
  uint32_t begin = 0;
  uint32_t count = 0;
  uint32_t tag = 0;
  uint32_t bytes = 0;
  uint32_t payload_crc = 0;
  uint32_t code = 0;
};

// Writes kHeaderBytes.
void Encode(const Header& header, char* out);

// `message_bytes`: of the whole message. INVALID_ARGUMENT or DATA_LOSS name what is wrong: magic,
// type, checksum of the header, a length that does not fit the message, the elements or the limit,
// a slot where there can be none. Whether the slot holds anything is for the region to say.
absl::StatusOr<Header> Decode(absl::string_view first_bytes, size_t message_bytes);

// DATA_LOSS: the payload is not what was sent.
absl::Status CheckPayload(const Header& header, uint32_t crc);

}  // namespace zeroshard::bulk
