#include "common/bulk/frame.h"

#include "absl/strings/str_cat.h"
#include "common/checksum.h"

namespace zeroshard::bulk {
namespace {

constexpr char kMagic[4] = {'Z', 'S', 'B', '1'};
constexpr size_t kSealed = 60;  // what the header's own checksum covers
constexpr uint32_t kLastCode = 16;

template <typename T>
void Put(T value, char* out) {
  for (size_t i = 0; i < sizeof(T); ++i) out[i] = static_cast<char>(value >> (8 * i));
}

template <typename T>
T Get(const char* in) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    value |= static_cast<T>(static_cast<unsigned char>(in[i])) << (8 * i);
  }
  return value;
}

bool CarriesElements(FrameType type) {
  return type == FrameType::kPush || type == FrameType::kData;
}

bool CarriesNothing(FrameType type) {
  return type == FrameType::kAck || type == FrameType::kPull || type == FrameType::kState ||
         type == FrameType::kRoom;
}

}  // namespace

void Encode(const Header& header, char* out) {
  std::memcpy(out, kMagic, sizeof(kMagic));
  out[4] = static_cast<char>(header.type);
  out[5] = static_cast<char>(header.dtype);
  Put(header.slot, out + 6);
  Put(header.generation, out + 8);
  Put(header.epoch, out + 16);
  Put(header.step, out + 24);
  Put(header.chunk, out + 32);
  Put(header.begin, out + 36);
  Put(header.count, out + 40);
  Put(header.tag, out + 44);
  Put(header.bytes, out + 48);
  Put(header.payload_crc, out + 52);
  Put(header.code, out + 56);
  Put(Crc32c(out, kSealed), out + kSealed);
}

absl::StatusOr<Header> Decode(absl::string_view first_bytes, size_t message_bytes) {
  if (first_bytes.size() < kHeaderBytes || message_bytes < kHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a bulk frame of ", message_bytes,
                                                   " bytes; its header alone has ", kHeaderBytes,
                                                   ": the peer speaks another protocol"));
  }
  const char* in = first_bytes.data();
  if (std::memcmp(in, kMagic, sizeof(kMagic)) != 0) {
    return absl::InvalidArgumentError(
        "a bulk frame does not begin with ZSB1: the peer speaks another version of the protocol");
  }
  const uint32_t seen = Get<uint32_t>(in + kSealed);
  if (const uint32_t wanted = Crc32c(in, kSealed); seen != wanted) {
    return absl::DataLossError(absl::StrCat(
        "a bulk frame's header has the checksum ", absl::Hex(seen, absl::kZeroPad8),
        ", its bytes have ", absl::Hex(wanted, absl::kZeroPad8), ": it was damaged on its way"));
  }
  const auto type = static_cast<unsigned char>(in[4]);
  if (type < static_cast<unsigned char>(FrameType::kHello) ||
      type > static_cast<unsigned char>(FrameType::kRoom)) {
    return absl::InvalidArgumentError(absl::StrCat("a bulk frame of the unknown type ", type));
  }
  const auto dtype = static_cast<unsigned char>(in[5]);
  if (dtype > static_cast<unsigned char>(DType::kF16)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a bulk frame of the unknown element type ", dtype));
  }
  Header header;
  header.type = static_cast<FrameType>(type);
  header.dtype = static_cast<DType>(dtype);
  header.slot = Get<uint16_t>(in + 6);
  header.generation = Get<uint64_t>(in + 8);
  header.epoch = Get<uint64_t>(in + 16);
  header.step = Get<uint64_t>(in + 24);
  header.chunk = Get<uint32_t>(in + 32);
  header.begin = Get<uint32_t>(in + 36);
  header.count = Get<uint32_t>(in + 40);
  header.tag = Get<uint32_t>(in + 44);
  header.bytes = Get<uint32_t>(in + 48);
  header.payload_crc = Get<uint32_t>(in + 52);
  header.code = Get<uint32_t>(in + 56);
  if (header.bytes > kMaxPayload) {
    return absl::InvalidArgumentError(absl::StrCat("a bulk frame announces ", header.bytes,
                                                   " bytes; the limit is ", kMaxPayload));
  }
  if (header.slot != 0) {
    if (header.slot > kMaxSlot) {
      return absl::InvalidArgumentError(absl::StrCat("a bulk frame in slot ", header.slot - 1,
                                                     "; a region has at most ", kMaxSlot));
    }
    if (!CarriesElements(header.type) || header.bytes == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("a bulk frame of type ", type, " with ", header.bytes,
                       " bytes names a slot; only gradients and data lie in one"));
    }
  }
  // What lies in a slot does not follow.
  const size_t follows = header.slot != 0 ? 0 : header.bytes;
  if (follows != message_bytes - kHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a bulk frame announces ", header.bytes, " bytes and carries ",
        message_bytes - kHeaderBytes, header.slot != 0 ? " although they lie in a slot" : ""));
  }
  if (header.count > kMaxElements || header.begin > kMaxElements) {
    return absl::InvalidArgumentError(absl::StrCat("a bulk frame of ", header.count,
                                                   " elements from element ", header.begin,
                                                   " on; a chunk has at most ", kMaxElements));
  }
  if (CarriesElements(header.type) &&
      uint64_t{header.count} * SizeOf(header.dtype) != header.bytes) {
    return absl::InvalidArgumentError(absl::StrCat("a bulk frame of ", header.count,
                                                   " elements of ", NameOf(header.dtype),
                                                   " carries ", header.bytes, " bytes"));
  }
  if (CarriesNothing(header.type) && header.bytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a bulk frame of type ", type, " carries ",
                                                   header.bytes, " bytes; it must have none"));
  }
  if (header.code > kLastCode) {
    return absl::InvalidArgumentError(
        absl::StrCat("a bulk frame with the unknown code ", header.code));
  }
  return header;
}

absl::Status CheckPayload(const Header& header, uint32_t crc) {
  if (crc == header.payload_crc) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "step ", header.step, ", chunk ", header.chunk, ", elements from ", header.begin,
      " on: ", header.bytes, " bytes came with the checksum ", absl::Hex(crc, absl::kZeroPad8),
      ", sent was ", absl::Hex(header.payload_crc, absl::kZeroPad8),
      ": they were damaged on their way"));
}

}  // namespace zeroshard::bulk
