#include "shard_store/nvme/chunk_layout.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/plan/nvme_bytes.h"

namespace zeroshard::nvme {
namespace {

static_assert(std::endian::native == std::endian::little, "fields are copied as they are");

constexpr char kHeaderMagic[] = "ZSNVME\r\n";
constexpr char kLabelMagic[] = "ZSBLOCK\n";
constexpr uint32_t kFormat = 1;
constexpr size_t kNameBytes = 64;
constexpr uint64_t kMostBytes = uint64_t{1} << 60;

template <typename T>
void Put(char* page, size_t at, T value) {
  std::memcpy(page + at, &value, sizeof(value));
}

template <typename T>
T Get(absl::Span<const char> page, size_t at) {
  T value;
  std::memcpy(&value, page.data() + at, sizeof(value));
  return value;
}

void PutName(char* page, size_t at, const std::string& name) {
  std::memcpy(page + at, name.data(), std::min(name.size(), kNameBytes));
}

std::string GetName(absl::Span<const char> page, size_t at) {
  return std::string(page.data() + at, strnlen(page.data() + at, kNameBytes));
}

uint64_t SectionBytes(int64_t elements, uint32_t element_bytes) {
  return NvmeSectionBytes(elements, element_bytes);
}

}  // namespace

const char* NameOf(Section section) {
  switch (section) {
    case kMaster:
      return "master";
    case kExpAvg:
      return "exp_avg";
    case kExpAvgSq:
      return "exp_avg_sq";
    case kParameters:
      return "parameters";
    case kStaging:
      return "staging";
  }
  return "?";
}

int64_t ChunkLayout::Entry::BlockElements(int block) const {
  return std::min(kBlockElements, shape.elements - block * kBlockElements);
}

uint64_t ChunkLayout::Entry::BlockOffset(Section section, int block) const {
  return SectionBytes(block * kBlockElements, element_bytes[section]);
}

absl::StatusOr<ChunkLayout> ChunkLayout::Make(const std::map<uint32_t, ChunkShape>& chunks,
                                              int spare_slots) {
  if (chunks.empty() || spare_slots < 0) {
    return absl::InvalidArgumentError(absl::StrCat("a file of ", chunks.size(), " chunks and ",
                                                   spare_slots, " spare slots; wanted: chunks"));
  }
  ChunkLayout layout;
  layout.spare_slots_ = spare_slots;
  uint64_t at = kHeaderBytes;
  for (const auto& [number, shape] : chunks) {
    Entry entry;
    entry.shape = shape;
    const uint64_t bytes[kSections] = {shape.bytes.master, shape.bytes.exp_avg,
                                       shape.bytes.exp_avg_sq, shape.bytes.parameters,
                                       shape.bytes.staging};
    const bool sane = shape.elements > 0 && shape.elements <= kChunkElements;
    char encoded[12 + kSections] = {};
    Put(encoded, 0, number);
    Put(encoded, 4, shape.elements);
    for (int i = 0; i < kSections; ++i) {
      const uint64_t elements = sane ? static_cast<uint64_t>(shape.elements) : 1;
      const uint64_t each = bytes[i] / elements;
      const bool fp32 = i <= kExpAvgSq;
      if (!sane || bytes[i] % elements != 0 || each > 4 || (fp32 && each != 0 && each != 4)) {
        return absl::InvalidArgumentError(
            absl::StrCat("chunk ", number, " of ", shape.elements, " elements has ", bytes[i],
                         " bytes of ", NameOf(static_cast<Section>(i)), "; wanted: 1 to ",
                         kChunkElements, " elements of up to 4 bytes (fp32 state: of 4)"));
      }
      entry.element_bytes[i] = static_cast<uint32_t>(each);
      entry.home.section[i] = at;
      encoded[12 + i] = static_cast<char>(each);
      at += SectionBytes(shape.elements, entry.element_bytes[i]);
      if (fp32 && each != 0) {
        layout.spare_section_ = std::max(layout.spare_section_, SectionBytes(shape.elements, 4));
      }
    }
    if (at > kMostBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("chunks up to number ", number, " take ", at, " bytes; no file holds them"));
    }
    layout.checksum_ = ExtendCrc32c(layout.checksum_, encoded, sizeof(encoded));
    layout.chunks_.emplace(number, entry);
  }
  layout.spare_begin_ = at;
  layout.file_bytes_ = at + static_cast<uint64_t>(spare_slots) * 3 * layout.spare_section_;
  return layout;
}

const ChunkLayout::Entry* ChunkLayout::Find(uint32_t chunk) const {
  const auto found = chunks_.find(chunk);
  return found == chunks_.end() ? nullptr : &found->second;
}

ChunkLayout::Place ChunkLayout::Spare(int slot) const {
  Place place;
  for (int i = 0; i <= kExpAvgSq; ++i) {
    place.section[i] = spare_begin_ + (static_cast<uint64_t>(slot) * 3 + static_cast<uint64_t>(i)) *
                                          spare_section_;
  }
  return place;
}

void Encode(const FileHeader& header, char* page) {
  std::memset(page, 0, kHeaderBytes);
  std::memcpy(page, kHeaderMagic, 8);
  Put(page, 8, kFormat);
  Put(page, 12, header.chunks);
  Put(page, 16, header.epoch);
  Put(page, 24, header.file_id);
  Put(page, 32, header.file_bytes);
  Put(page, 40, header.spare_slots);
  Put(page, 44, header.layout_crc);
  PutName(page, 48, header.run_id);
  PutName(page, 112, header.incarnation);
  Put(page, 176, Crc32c(page, 176));
}

absl::StatusOr<FileHeader> DecodeHeader(absl::Span<const char> page) {
  if (page.size() < 180 || std::memcmp(page.data(), kHeaderMagic, 8) != 0) {
    return absl::DataLossError("it does not begin as a file of chunks does");
  }
  if (const uint32_t format = Get<uint32_t>(page, 8); format != kFormat) {
    return absl::DataLossError(
        absl::StrCat("its format is ", format, ", this program's ", kFormat));
  }
  if (Get<uint32_t>(page, 176) != Crc32c(page.data(), 176)) {
    return absl::DataLossError("its header is damaged (CRC-32C)");
  }
  FileHeader header;
  header.chunks = Get<uint32_t>(page, 12);
  header.epoch = Get<uint64_t>(page, 16);
  header.file_id = Get<uint64_t>(page, 24);
  header.file_bytes = Get<uint64_t>(page, 32);
  header.spare_slots = Get<uint32_t>(page, 40);
  header.layout_crc = Get<uint32_t>(page, 44);
  header.run_id = GetName(page, 48);
  header.incarnation = GetName(page, 112);
  return header;
}

void Encode(const BlockLabel& label, char* page) {
  std::memset(page, 0, kLabelBytes);
  std::memcpy(page, kLabelMagic, 8);
  Put(page, 8, label.id.chunk);
  Put(page, 12, static_cast<uint32_t>(label.id.section));
  Put(page, 16, static_cast<uint32_t>(label.id.block));
  Put(page, 20, label.payload_bytes);
  Put(page, 24, label.version);
  Put(page, 32, label.file_id);
  Put(page, 40, label.crc);
  Put(page, 44, Crc32c(page, 44));
}

absl::StatusOr<BlockLabel> DecodeLabel(absl::Span<const char> page) {
  if (page.size() < 48 || std::memcmp(page.data(), kLabelMagic, 8) != 0) {
    return absl::DataLossError("it has no label: it was never written, or is damaged");
  }
  const uint32_t section = Get<uint32_t>(page, 12), block = Get<uint32_t>(page, 16);
  if (Get<uint32_t>(page, 44) != Crc32c(page.data(), 44) || section >= kSections ||
      block >= static_cast<uint32_t>(kChunkElements / kBlockElements)) {
    return absl::DataLossError("its label is damaged");
  }
  BlockLabel label;
  label.id = {Get<uint32_t>(page, 8), static_cast<Section>(section), static_cast<int>(block)};
  label.payload_bytes = Get<uint32_t>(page, 20);
  label.version = Get<uint64_t>(page, 24);
  label.file_id = Get<uint64_t>(page, 32);
  label.crc = Get<uint32_t>(page, 40);
  return label;
}

}  // namespace zeroshard::nvme
