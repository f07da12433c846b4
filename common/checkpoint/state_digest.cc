#include "common/checkpoint/state_digest.h"

#include <algorithm>
#include <bitset>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/parameter_source.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection that mixes every bit.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The two hashes of a block are chains of dependent multiplications. Several blocks side by side
// keep the processor busy: about three times as fast as one after the other.
constexpr size_t kBlock = 64, kSide = 4;

template <size_t kBlocks>
void AddBlocks(uint64_t unit, uint64_t element, const float* values, size_t length,
               WeightDigest* digest) {
  uint64_t a[kBlocks], b[kBlocks];
  for (size_t k = 0; k < kBlocks; ++k) {
    a[k] = Mix(Mix(unit) ^ (element + k * kBlock));
    b[k] = Mix(~a[k]);
  }
  for (size_t i = 0; i < length; ++i) {
    for (size_t k = 0; k < kBlocks; ++k) {
      uint32_t bits = 0;
      std::memcpy(&bits, &values[k * kBlock + i], sizeof(bits));
      a[k] = Mix(a[k] ^ bits);
      b[k] = Mix(b[k] + bits);
    }
  }
  for (size_t k = 0; k < kBlocks; ++k) {
    digest->low += a[k];
    digest->high += b[k];
  }
}

}  // namespace

void WeightDigest::Add(uint64_t unit, uint64_t element, absl::Span<const float> values) {
  size_t at = 0;
  for (; at + kSide * kBlock <= values.size(); at += kSide * kBlock)
    AddBlocks<kSide>(unit, element + at, values.data() + at, kBlock, this);
  for (; at < values.size(); at += kBlock)
    AddBlocks<1>(unit, element + at, values.data() + at, std::min(kBlock, values.size() - at),
                 this);
}

void WeightDigest::Combine(const WeightDigest& other) {
  low += other.low;
  high += other.high;
}

std::string WeightDigest::Hex() const { return absl::StrFormat("%016x%016x", high, low); }

void PartedDigest::Add(uint64_t unit, uint64_t element, absl::Span<const float> values, bool ends) {
  // Elements of one block, which it may be all of.
  const auto add = [&](absl::Span<const float> some) {
    BlockPart part{.unit = static_cast<uint32_t>(unit), .block = element / kBlock * kBlock};
    part.begin = static_cast<uint32_t>(element - part.block);
    std::copy(some.begin(), some.end(), part.values + part.begin);
    part.end = part.begin + static_cast<uint32_t>(some.size());
    element += some.size();
    values.remove_prefix(some.size());
    if (ends && values.empty()) part.end = kBlock;
    if (part.begin == 0 && part.end == kBlock) {
      whole.Add(unit, part.block, part.values);
    } else {
      parts.push_back(part);
    }
  };
  if (values.empty()) return;
  if (element % kBlock != 0)
    add(values.first(std::min<size_t>(kBlock - element % kBlock, values.size())));
  const size_t blocks = values.size() / kBlock * kBlock;
  whole.Add(unit, element, values.first(blocks));
  element += blocks;
  values.remove_prefix(blocks);
  if (!values.empty()) add(values);
}

void PartedDigest::Combine(const PartedDigest& other) {
  whole.Combine(other.whole);
  parts.insert(parts.end(), other.parts.begin(), other.parts.end());
}

absl::StatusOr<WeightDigest> JoinParts(const std::vector<BlockPart>& parts) {
  struct Block {
    float values[kBlock] = {};
    std::bitset<kBlock> there;
  };
  std::map<std::pair<uint32_t, uint64_t>, Block> blocks;
  const auto error = [](uint32_t unit, uint64_t block, const char* problem) {
    return absl::InternalError(absl::StrFormat(
        "digest of the state: of the elements of unit %d from %d to %d some %s; wanted each from "
        "one rank",
        unit, block, block + kBlock, problem));
  };
  for (const BlockPart& part : parts) {
    if (part.begin > part.end || part.end > kBlock)
      return error(part.unit, part.block, "are outside of them");
    Block& block = blocks[{part.unit, part.block}];
    for (uint32_t i = part.begin; i < part.end; ++i) {
      if (block.there[i]) return error(part.unit, part.block, "are from two ranks");
      block.there[i] = true;
      block.values[i] = part.values[i];
    }
  }
  WeightDigest digest;
  for (const auto& [place, block] : blocks) {
    if (!block.there.all()) return error(place.first, place.second, "are from no rank");
    digest.Add(place.first, place.second, block.values);
  }
  return digest;
}

absl::StatusOr<std::string> DigestOf(const CheckpointReader& reader, const ModelTable& model,
                                     StateKind kind) {
  constexpr int64_t kPiece = int64_t{1} << 16;
  static_assert(kPiece % kBlock == 0);
  const std::unique_ptr<ParameterSource> source = reader.Source(kind);
  const auto has_kind = [kind](const ParameterInfo& tensor) {
    return kind == StateKind::kMaster || tensor.trainable;
  };
  WeightDigest digest;
  std::vector<float> values;
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    const std::vector<ParameterInfo>& tensors = model.units[unit].parameters;
    if (std::none_of(tensors.begin(), tensors.end(), has_kind)) continue;
    for (const ParameterInfo& tensor : tensors) {
      for (int64_t begin = 0; begin < tensor.size; begin += kPiece) {
        const int64_t end = std::min(begin + kPiece, tensor.size);
        const auto count = static_cast<size_t>(end - begin);
        // Padding follows a tensor up to a whole block.
        values.assign((count + kBlock - 1) / kBlock * kBlock, 0.0f);
        if (has_kind(tensor)) {
          ZS_RETURN_IF_ERROR(source->Read(tensor, begin, end, values.data()));
        }
        digest.Add(unit, static_cast<uint64_t>(tensor.offset + begin), values);
      }
    }
  }
  return digest.Hex();
}

}  // namespace zeroshard
