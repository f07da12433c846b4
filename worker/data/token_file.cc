#include "worker/data/token_file.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace zeroshard {
namespace {

constexpr int64_t kHeaderBytes = 256 * 4;

struct HeaderKind {
  uint32_t magic;
  int32_t version;
  int width;
};
constexpr HeaderKind kHeaders[] = {{20240520, 1, 2}, {20240801, 7, 4}};

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

// Ids are checked in blocks, so that the search for the greatest one runs at memory speed.
constexpr int64_t kBlock = 4096;

template <typename T>
absl::Status CheckIds(const std::string& path, const uint8_t* ids, int64_t count, int64_t vocab) {
  T odd = 0, even = 0;  // all ids at odd and at even places, or-ed together
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    T greatest = 0;
    T bits[2] = {0, 0};
    for (int64_t i = begin; i < end; ++i) {
      const T id = Load<T>(ids + i * sizeof(T));
      greatest = std::max(greatest, id);
      bits[i & 1] |= id;
    }
    even |= bits[0];
    odd |= bits[1];
    if (static_cast<int64_t>(greatest) < vocab) continue;
    for (int64_t i = begin; i < end; ++i) {
      const T id = Load<T>(ids + i * sizeof(T));
      if (static_cast<int64_t>(id) < vocab) continue;
      return Refuse(path, absl::StrCat("token ", i, " has id ", static_cast<uint32_t>(id),
                                       ", but model.vocab_size is ", vocab,
                                       "; ids must be below it. Raise model.vocab_size to that of "
                                       "the tokenizer, or write the file again"));
    }
  }
  if (std::is_same_v<T, uint16_t> && count >= 64 && odd == 0 && even != 0) {
    return Refuse(path,
                  "every second 16-bit id is 0, so these are 32-bit ids without a header; write "
                  "them as uint16, or with llm.c's header for uint32 (magic 20240801, version 7)");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenLayout> RecognizeTokenFile(const std::string& path,
                                               absl::Span<const uint8_t> bytes) {
  const int64_t size = bytes.size();
  if (size == 0) return Refuse(path, "is empty (0 bytes)");
  const absl::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (const OtherFormat& other : kOthers) {
    if (absl::StartsWith(text, other.start)) {
      return Refuse(path, absl::StrCat("is ", other.name,
                                       ", not token ids; wanted llm.c's .bin or raw uint16"));
    }
  }
  const uint32_t magic = size >= 4 ? Load<uint32_t>(bytes.data()) : 0;
  for (const HeaderKind& kind : kHeaders) {
    if (magic != kind.magic) continue;
    if (size < kHeaderBytes) {
      return Refuse(path, absl::StrCat("starts with magic ", magic, " but has ", size,
                                       " bytes, fewer than the header's ", kHeaderBytes));
    }
    const int32_t version = Load<int32_t>(bytes.data() + 4);
    const int32_t count = Load<int32_t>(bytes.data() + 8);
    if (version != kind.version) {
      return Refuse(path, absl::StrCat("magic ", magic, " with version ", version,
                                       "; wanted version ", kind.version));
    }
    const int64_t wanted = kHeaderBytes + static_cast<int64_t>(count) * kind.width;
    if (count < 0 || wanted != size) {
      return Refuse(path, absl::StrCat("the header says ", count, " tokens of ", kind.width,
                                       " bytes, so ", wanted, " bytes with the header, but it has ",
                                       size, "; it is cut short or padded"));
    }
    return TokenLayout{kHeaderBytes, kind.width, count};
  }
  if (size % 2 != 0) {
    return Refuse(path, absl::StrCat("has ", size,
                                     " bytes and no header, so it should hold 16-bit ids, but that "
                                     "is an odd number of bytes; it is cut short or not a token "
                                     "file (tokenizer: bytes reads text)"));
  }
  return TokenLayout{0, 2, size / 2};
}

absl::Status CheckTokenIds(const std::string& path, absl::Span<const uint8_t> bytes,
                           const TokenLayout& layout, int64_t vocab_size) {
  const uint8_t* ids = bytes.data() + layout.offset;
  return layout.width == 2 ? CheckIds<uint16_t>(path, ids, layout.count, vocab_size)
                           : CheckIds<uint32_t>(path, ids, layout.count, vocab_size);
}

}  // namespace zeroshard
