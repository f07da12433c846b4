// Megatron's indexed token files: PREFIX.bin holds the ids of all sequences one after another,
// PREFIX.idx describes them. All numbers are little-endian, nothing is aligned:
//   9 bytes  "MMIDIDX\0\0"
//   uint64   version, 1
//   uint8    type of an id: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16 (6, 7: floats)
//   uint64   n, the sequences
//   uint64   m, the document indices
//   int32[n] ids of a sequence
//   int64[n] its first byte in PREFIX.bin: the bytes of all before it
//   int64[m] the sequence at which a document begins: 0 first, never falling, n last
// Files for images have n more bytes, a mode for each sequence.
// (NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.)
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "worker/data/file_bytes.h"
#include "worker/data/token_file.h"

namespace zeroshard {

// A checked .idx file. Immutable, movable, thread-safe.
class MegatronIndex {
 public:
  // Checks every number of `index`, the file at `path`, and that it describes `bin_bytes` bytes.
  // INVALID_ARGUMENT names the file, the field, the value seen and the value wanted.
  static absl::StatusOr<MegatronIndex> Parse(const std::string& path, FileBytes index,
                                             int64_t bin_bytes);
  static bool HasMagic(absl::Span<const uint8_t> index);

  const std::string& path() const { return path_; }
  const TokenLayout& layout() const { return layout_; }  // of the .bin file
  // Whether the document indices reach to the last sequence. Some writers leave them out.
  bool has_documents() const { return has_documents_; }
  // Document `d` in [0, documents()) begins with this token; a document may be empty. None if the
  // file was written to since it was checked.
  int64_t documents() const { return documents_; }
  std::optional<int64_t> DocumentBegin(int64_t d) const;

 private:
  MegatronIndex(std::string path, FileBytes index)
      : path_(std::move(path)), index_(std::move(index)) {}

  std::string path_;
  FileBytes index_;
  TokenLayout layout_;
  int64_t sequences_ = 0;
  int64_t documents_ = 0;
  bool has_documents_ = false;
};

}  // namespace zeroshard
