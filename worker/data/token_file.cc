#include "worker/data/token_file.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr int64_t kHeaderBytes = 256 * 4;

struct HeaderKind {
  uint32_t magic;
  int32_t version;
  IdType type;
};
constexpr HeaderKind kHeaders[] = {{20240520, 1, IdType::kUint16}, {20240801, 7, IdType::kUint32}};

// Files that people pass by mistake, and that would read as 16-bit ids without any complaint.
struct OtherFormat {
  absl::string_view start;
  const char* name;
};
constexpr OtherFormat kOthers[] = {{"\x93NUMPY", "a NumPy array (.npy)"},
                                   {"MMIDIDX", "a Megatron index (.idx)"},
                                   {"\x1f\x8b", "gzip data"},
                                   {"\x28\xb5\x2f\xfd", "zstd data"},
                                   {"PK\x03\x04", "a zip archive (PyTorch .pt, .npz)"},
                                   {"PAR1", "a Parquet file"}};

template <typename T>
T Load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

absl::Status Refuse(const std::string& path, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("token file ", path, ": ", why));
}

// Calls f with a value of the id type.
template <typename F>
auto Dispatch(IdType type, F f) {
  switch (type) {
    case IdType::kUint8:
      return f(uint8_t{});
    case IdType::kInt8:
      return f(int8_t{});
    case IdType::kUint16:
      return f(uint16_t{});
    case IdType::kInt16:
      return f(int16_t{});
    case IdType::kUint32:
      return f(uint32_t{});
    case IdType::kInt32:
      return f(int32_t{});
    case IdType::kInt64:
      break;
  }
  return f(int64_t{});
}

// Ids are checked in blocks, so that the search for the greatest one runs at memory speed. A
// negative id, taken for unsigned, is beyond every vocabulary of its signed type.
constexpr int64_t kBlock = 4096;
constexpr int kLanes = 32;

template <typename T>
absl::Status CheckIds(const std::string& path, const uint8_t* ids, int64_t count, int64_t vocab) {
  using Unsigned = std::make_unsigned_t<T>;
  const uint64_t limit = std::is_signed_v<T>
                             ? std::min<uint64_t>(vocab, Unsigned(~Unsigned{0}) / 2 + uint64_t{1})
                             : static_cast<uint64_t>(vocab);
  Unsigned even = 0, odd = 0;  // the greatest ids at even and at odd places
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    Unsigned greatest[kLanes] = {};
    int64_t at = begin;
    for (; at + kLanes <= end; at += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        greatest[lane] = std::max(greatest[lane], Load<Unsigned>(ids + (at + lane) * sizeof(T)));
      }
    }
    for (int lane = 0; at < end; ++at, ++lane) {
      greatest[lane] = std::max(greatest[lane], Load<Unsigned>(ids + at * sizeof(T)));
    }
    for (int lane = 0; lane < kLanes; lane += 2) {
      even = std::max(even, greatest[lane]);
      odd = std::max(odd, greatest[lane + 1]);
    }
    if (std::max(even, odd) < limit) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (Load<Unsigned>(ids + i * sizeof(T)) < limit) continue;
      return Refuse(
          path, absl::StrCat("token ", i, " has id ", int64_t{Load<T>(ids + i * sizeof(T))},
                             ", but model.vocab_size is ", vocab,
                             "; ids must be from 0 on and below it. Raise model.vocab_size to that "
                             "of the tokenizer, or write the file again"));
    }
  }
  // The upper halves of 32-bit ids are no greater than the vocabulary's; the lower ones are.
  const uint64_t upper = static_cast<uint64_t>(vocab - 1) >> 16;
  if (std::is_same_v<T, uint16_t> && count >= 64 && odd <= upper && even > upper) {
    return Refuse(
        path, absl::StrCat(
                  "every second 16-bit id is ", upper == 0 ? "" : "at most ", upper,
                  ", so these are 32-bit ids without a header; write "
                  "them as uint16, or with llm.c's header for uint32 (magic 20240801, version 7)"));
  }
  return absl::OkStatus();
}

// No byte that a text does not have. Of 128 16-bit ids of any tokenizer one has such a byte but
// once in a million files: an eighth of all low bytes are control characters.
bool LooksLikeText(absl::Span<const uint8_t> bytes) {
  constexpr size_t kLeast = 256, kLooked = 64 << 10;
  if (bytes.size() < kLeast) return false;
  for (const uint8_t byte : bytes.first(std::min(bytes.size(), kLooked))) {
    if ((byte < ' ' && (byte < '\t' || byte > '\r')) || byte == 0x7f) return false;
  }
  return true;
}

absl::StatusOr<TokenLayout> WithHeader(const std::string& path, absl::Span<const uint8_t> bytes,
                                       const HeaderKind& kind, const char* else_say) {
  const int64_t size = bytes.size();
  if (size < kHeaderBytes) {
    return Refuse(path, absl::StrCat("starts with magic ", kind.magic, " but has ", size,
                                     " bytes, fewer than the header's ", kHeaderBytes, else_say));
  }
  const int32_t version = Load<int32_t>(bytes.data() + 4);
  const int32_t count = Load<int32_t>(bytes.data() + 8);
  if (version != kind.version) {
    return Refuse(path, absl::StrCat("magic ", kind.magic, " with version ", version,
                                     "; wanted version ", kind.version, else_say));
  }
  const int width = WidthOf(kind.type);
  const int64_t wanted = kHeaderBytes + static_cast<int64_t>(count) * width;
  if (count < 0 || wanted != size) {
    return Refuse(path, absl::StrCat("the header says ", count, " tokens of ", width, " bytes, so ",
                                     wanted, " bytes with the header, but it has ", size,
                                     "; it is cut short or padded", else_say));
  }
  return TokenLayout{kHeaderBytes, kind.type, count};
}

}  // namespace

absl::StatusOr<TokenFormat> TokenFormatOf(absl::string_view name) {
  if (name.empty() || name == "auto") return TokenFormat::kAuto;
  if (name == "llm.c") return TokenFormat::kLlmC;
  if (name == "nanogpt") return TokenFormat::kNanoGpt;
  if (name == "megatron") return TokenFormat::kMegatron;
  return absl::InvalidArgumentError(
      absl::StrCat("data.format is \"", name,
                   "\"; with data.tokenizer tokens wanted auto, llm.c, nanogpt or "
                   "megatron"));
}

int WidthOf(IdType type) {
  return Dispatch(type, [](auto id) { return static_cast<int>(sizeof(id)); });
}

absl::StatusOr<TokenLayout> RecognizeTokenFile(const std::string& path,
                                               absl::Span<const uint8_t> bytes,
                                               TokenFormat format) {
  const int64_t size = bytes.size();
  if (size == 0) return Refuse(path, "is empty (0 bytes)");
  const bool guess = format == TokenFormat::kAuto;
  if (format != TokenFormat::kNanoGpt) {
    const uint32_t magic = size >= 4 ? Load<uint32_t>(bytes.data()) : 0;
    for (const HeaderKind& kind : kHeaders) {
      if (magic != kind.magic) continue;
      return WithHeader(path, bytes, kind,
                        guess ? ". If these are raw 16-bit ids that happen to start like llm.c's "
                                "header, write data.format: nanogpt"
                              : "");
    }
    if (!guess) {
      return Refuse(path, absl::StrCat("starts with ", magic,
                                       ", but data.format is llm.c, whose "
                                       "files start with 20240520 or 20240801"));
    }
  }
  if (guess) {
    const absl::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    for (const OtherFormat& other : kOthers) {
      if (!absl::StartsWith(text, other.start)) continue;
      return Refuse(path, absl::StrCat("is ", other.name,
                                       ", not token ids; wanted llm.c's .bin, raw uint16, or a "
                                       "Megatron .bin with its .idx beside it"));
    }
    if (LooksLikeText(bytes)) {
      return Refuse(path,
                    "is text, not token ids; name a data.tokenizer to read it with. If these are "
                    "raw 16-bit ids all the same, write data.format: nanogpt");
    }
  }
  if (size % 2 != 0) {
    return Refuse(path, absl::StrCat("has ", size,
                                     " bytes and no header, so it should hold 16-bit ids, but that "
                                     "is an odd number of bytes; it is cut short or not a token "
                                     "file (tokenizer: bytes reads text)"));
  }
  return TokenLayout{0, IdType::kUint16, size / 2};
}

absl::Status CheckTokenIds(const std::string& path, absl::Span<const uint8_t> bytes,
                           const TokenLayout& layout, int64_t vocab_size) {
  const uint8_t* ids = bytes.data() + layout.offset;
  return Dispatch(layout.type, [&](auto id) {
    return CheckIds<decltype(id)>(path, ids, layout.count, vocab_size);
  });
}

int64_t CopyTokenIds(absl::Span<const uint8_t> bytes, const TokenLayout& layout, int64_t first,
                     int64_t vocab_size, absl::Span<int32_t> to, int64_t* bad) {
  return Dispatch(layout.type, [&](auto zero) -> int64_t {
    using T = decltype(zero);
    const uint8_t* from = bytes.data() + layout.offset + first * sizeof(T);
    for (size_t i = 0; i < to.size(); ++i) {
      const T id = Load<T>(from + i * sizeof(T));
      to[i] = static_cast<int32_t>(id);
      if (static_cast<int64_t>(id) >= 0 && static_cast<int64_t>(id) < vocab_size) continue;
      *bad = static_cast<int64_t>(id);
      return static_cast<int64_t>(i);
    }
    return static_cast<int64_t>(to.size());
  });
}

}  // namespace zeroshard
