// Where the chunks of a job lie in their file. Pure arithmetic; immutable, thread-safe.
//
// The file, little-endian, everything at multiples of 4096 bytes:
//
//   header        4096 bytes, below
//   chunks        by number; of each its sections master, exp_avg, exp_avg_sq, parameters, staging,
//                 those of 0 bytes left out
//   spare slots   each with room for master, exp_avg and exp_avg_sq of any chunk
//
// A section is a row of blocks of 2^18 elements (the last may have fewer): 1 MiB in fp32, 512 KiB
// in 16 bits. A block is its payload, zeros to a multiple of 4096, and a label of 4096 bytes; it is
// written and read whole, in one operation.
//
//   header                                       label
//   offset size                                  offset size
//        0    8  magic "ZSNVME\r\n"                   0    8  magic "ZSBLOCK\n"
//        8    4  format version, 1                    8    4  chunk
//       12    4  number of chunks                    12    4  section, 0 to 4 in the order above
//       16    8  epoch                               16    4  block
//       24    8  file id, random                     20    4  bytes of payload
//       32    8  bytes of the file                   24    8  version (a step)
//       40    4  spare slots                         32    8  file id
//       44    4  CRC-32C of the layout               40    4  CRC-32C of the payload
//       48   64  run id, then zeros                  44    4  CRC-32C of the 44 bytes before
//      112   64  incarnation, then zeros             48       zeros
//      176    4  CRC-32C of the 176 bytes before
//      180       zeros
//
// The layout's checksum is that of, for each chunk: number (4), elements (8), element bytes of the
// five sections (1 each).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/plan/chunk_table.h"
#include "common/plan/nvme_bytes.h"
#include "shard_store/nvme/direct_file.h"

namespace zeroshard::nvme {

enum Section { kMaster, kExpAvg, kExpAvgSq, kParameters, kStaging };
constexpr int kSections = 5;
const char* NameOf(Section section);

constexpr int64_t kBlockElements = kNvmeBlockElements;
constexpr uint32_t kLabelBytes = kAlignment;
constexpr uint32_t kHeaderBytes = kAlignment;
// What a buffer must hold: the largest block.
constexpr uint32_t kBufferBytes = static_cast<uint32_t>(kBlockElements) * 4 + kLabelBytes;

// A chunk as it is kept: `bytes` per section are a whole number of bytes an element, 0: not kept.
struct ChunkShape {
  int64_t elements = 0;
  ChunkBytes bytes;
};

struct BlockId {
  uint32_t chunk = 0;
  Section section = kMaster;
  int block = 0;
};

class ChunkLayout {
 public:
  // INVALID_ARGUMENT: no chunks, sizes that are no multiple of the elements or above 4 bytes each,
  // or a sum beyond what a file can hold.
  static absl::StatusOr<ChunkLayout> Make(const std::map<uint32_t, ChunkShape>& chunks,
                                          int spare_slots);

  struct Place {
    std::array<uint64_t, kSections> section = {};  // offsets
  };
  struct Entry {
    ChunkShape shape;
    std::array<uint32_t, kSections> element_bytes = {};
    Place home;
    bool HasState() const { return element_bytes[kMaster] != 0; }
    int blocks() const {
      return static_cast<int>((shape.elements + kBlockElements - 1) / kBlockElements);
    }
    int64_t BlockElements(int block) const;
    uint32_t PayloadBytes(Section section, int block) const {
      return static_cast<uint32_t>(BlockElements(block)) * element_bytes[section];
    }
    uint64_t BlockOffset(Section section, int block) const;  // within the section
  };

  const std::map<uint32_t, Entry>& chunks() const { return chunks_; }
  const Entry* Find(uint32_t chunk) const;  // null: not here
  Place Spare(int slot) const;
  int spare_slots() const { return spare_slots_; }
  uint64_t file_bytes() const { return file_bytes_; }
  uint32_t checksum() const { return checksum_; }

  static uint32_t PaddedBytes(uint32_t payload) {  // without the label
    return (payload + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  std::map<uint32_t, Entry> chunks_;
  int spare_slots_ = 0;
  uint64_t spare_begin_ = 0, spare_section_ = 0;
  uint64_t file_bytes_ = 0;
  uint32_t checksum_ = 0;
};

struct FileHeader {
  uint32_t chunks = 0, spare_slots = 0;
  uint64_t epoch = 0, file_id = 0, file_bytes = 0;
  uint32_t layout_crc = 0;
  std::string run_id, incarnation;  // at most 64 bytes each
};
void Encode(const FileHeader& header, char* page);
// DATA_LOSS: not such a header, of another format version, or damaged.
absl::StatusOr<FileHeader> DecodeHeader(absl::Span<const char> page);

struct BlockLabel {
  BlockId id;
  uint32_t payload_bytes = 0;
  uint64_t version = 0, file_id = 0;
  uint32_t crc = 0;
};
void Encode(const BlockLabel& label, char* page);
absl::StatusOr<BlockLabel> DecodeLabel(absl::Span<const char> page);

}  // namespace zeroshard::nvme
