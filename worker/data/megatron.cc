#include "worker/data/megatron.h"

#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace zeroshard {
namespace {

constexpr absl::string_view kMagic("MMIDIDX\0\0", 9);
constexpr int64_t kTypeOffset = 9 + 8;
constexpr int64_t kHeaderBytes = kTypeOffset + 1 + 8 + 8;

template <typename T>
T Load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

// The arrays of an index with `sequences` of them.
int64_t SizeAt(int64_t i) { return kHeaderBytes + 4 * i; }
int64_t PointerAt(int64_t sequences, int64_t i) { return SizeAt(sequences) + 8 * i; }
int64_t DocumentAt(int64_t sequences, int64_t i) { return PointerAt(sequences, sequences) + 8 * i; }

std::optional<IdType> TypeOf(uint8_t code) {
  switch (code) {
    case 1:
      return IdType::kUint8;
    case 2:
      return IdType::kInt8;
    case 3:
      return IdType::kInt16;
    case 4:
      return IdType::kInt32;
    case 5:
      return IdType::kInt64;
    case 8:
      return IdType::kUint16;
    default:
      return std::nullopt;
  }
}

template <typename... Parts>
absl::Status Refuse(const std::string& path, const Parts&... why) {
  return absl::InvalidArgumentError(absl::StrCat("Megatron index ", path, ": ", why...));
}

}  // namespace

bool MegatronIndex::HasMagic(absl::Span<const uint8_t> index) {
  return absl::StartsWith(
      absl::string_view(reinterpret_cast<const char*>(index.data()), index.size()), kMagic);
}

absl::StatusOr<MegatronIndex> MegatronIndex::Parse(const std::string& path, FileBytes index,
                                                   int64_t bin_bytes) {
  MegatronIndex result(path, std::move(index));
  const absl::Span<const uint8_t> bytes = result.index_.bytes();
  const uint8_t* data = bytes.data();
  const int64_t size = bytes.size();
  if (!HasMagic(bytes)) return Refuse(path, "does not start with MMIDIDX and two zero bytes");
  if (size < kHeaderBytes) {
    return Refuse(path, "has ", size, " bytes, fewer than the header's ", kHeaderBytes);
  }
  const uint64_t version = Load<uint64_t>(data + kMagic.size());
  if (version != 1) return Refuse(path, "has version ", version, "; wanted 1");
  const uint8_t code = data[kTypeOffset];
  const std::optional<IdType> type = TypeOf(code);
  if (!type.has_value()) {
    return Refuse(path, "ids are of type ", code, code == 6 || code == 7 ? " (floating point)" : "",
                  "; wanted an integer type: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16");
  }
  const uint64_t sequences = Load<uint64_t>(data + kTypeOffset + 1);
  const uint64_t indices = Load<uint64_t>(data + kTypeOffset + 9);
  const uint64_t room = size - kHeaderBytes;
  const bool fits = sequences <= room / 12 && indices <= room / 8;
  const uint64_t used = fits ? 12 * sequences + 8 * indices : 0;
  if (fits && sequences > 0 && used + sequences == room) {
    return Refuse(path,
                  "carries a mode for each sequence, as data of images and text does; wanted "
                  "text alone");
  }
  if (!fits || used != room) {
    return Refuse(path, "says ", sequences, " sequences and ", indices,
                  " document indices, of 12 and 8 bytes, but has ", room,
                  " bytes behind its header; it is cut short or padded");
  }

  const int width = WidthOf(*type);
  int64_t total = 0;
  for (uint64_t i = 0; i < sequences; ++i) {
    const int32_t length = Load<int32_t>(data + SizeAt(i));
    const int64_t pointer = Load<int64_t>(data + PointerAt(sequences, i));
    if (length < 0) return Refuse(path, "sequence ", i, " has length ", length);
    if (pointer != total) {
      return Refuse(path, "sequence ", i, " begins at byte ", pointer, "; wanted ", total,
                    ", the bytes of those before it");
    }
    total += int64_t{length} * width;
    if (total > bin_bytes) break;  // before it can overflow
  }
  if (total != bin_bytes) {
    return Refuse(path, "its sequences take ", total > bin_bytes ? "more than " : "",
                  total > bin_bytes ? bin_bytes : total, " bytes, but the .bin file beside it has ",
                  bin_bytes,
                  "; one of the two is cut short or padded, or they do not belong "
                  "together");
  }
  int64_t last = 0;
  for (uint64_t i = 0; i < indices; ++i) {
    const int64_t sequence = Load<int64_t>(data + DocumentAt(sequences, i));
    if (i == 0 && sequence != 0) {
      return Refuse(path, "the first document begins at sequence ", sequence, "; wanted 0");
    }
    if (sequence < last || sequence > static_cast<int64_t>(sequences)) {
      return Refuse(path, "document index ", i, " is ", sequence, "; wanted one from ", last,
                    ", the one before it, to ", sequences, ", the number of sequences");
    }
    last = sequence;
  }
  result.layout_ = {0, *type, bin_bytes / width};
  result.sequences_ = static_cast<int64_t>(sequences);
  result.documents_ = indices == 0 ? 0 : static_cast<int64_t>(indices) - 1;
  result.has_documents_ = indices > 0 && last == result.sequences_;
  result.index_.DropPages();
  return result;
}

std::optional<int64_t> MegatronIndex::DocumentBegin(int64_t d) const {
  const uint8_t* data = index_.bytes().data();
  const int64_t sequence = Load<int64_t>(data + DocumentAt(sequences_, d));
  if (sequence < 0 || sequence > sequences_) return std::nullopt;
  if (sequence == sequences_) return layout_.count;
  const int64_t token =
      Load<int64_t>(data + PointerAt(sequences_, sequence)) / WidthOf(layout_.type);
  if (token < 0 || token > layout_.count) return std::nullopt;
  return token;
}

}  // namespace zeroshard
