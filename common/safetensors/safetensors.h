// Files of named tensors in the safetensors format: a strict reader and a writer, both by streams:
// neither holds more than the header in memory.
//
// The format, little endian:
//   bytes 0-7        n, the length of the header, an unsigned 64-bit number
//   bytes 8 to 8+n   the header, a JSON object, spaces allowed behind it:
//                      {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...,
//                       "__metadata__": {"format": "pt"}}
//   the rest         the data. data_offsets are [begin, end) from the first byte behind the header;
//                    in order of begin the tensors tile the data without gap or overlap.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/types.h"

namespace zeroshard {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;           // as in the file: "F32", "BF16", "I64", ...
  std::vector<int64_t> shape;  // empty: one element
  uint64_t begin = 0;          // bytes from the start of the data
  uint64_t end = 0;
  int64_t elements() const;
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry> tensors;  // by name
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0;  // of the data in the file: 8 + n
};

// Checks everything that can be checked without reading the data: `head` is the file's first bytes
// (8 + n of them at least, where the file has as many), `file_size` its size. INVALID_ARGUMENT
// names `where`, the tensor, what was seen and what was wanted. A header is refused beyond 100 MB
// (the format's own limit) before it is read.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view head, uint64_t file_size,
                                                         const std::string& where);

// An open file, mapped into memory: opening reads the header only. Immutable and thread-safe. A
// file that another process shortens while it is mapped ends this process (SIGBUS).
class SafetensorsFile {
 public:
  // NOT_FOUND or PERMISSION_DENIED as the system says; INVALID_ARGUMENT as above.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const std::map<std::string, SafetensorsEntry>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }

  // NOT_FOUND names the nearest tensors.
  absl::StatusOr<const SafetensorsEntry*> Find(const std::string& name) const;
  // Valid as long as the file object; not necessarily aligned.
  absl::string_view Bytes(const SafetensorsEntry& tensor) const;

  // A copy of one tensor's values. INVALID_ARGUMENT where its type is another: floats are read from
  // F32, F16 and BF16 (exactly), integers from I32.
  absl::StatusOr<std::vector<float>> ReadFloats(const std::string& name) const;
  absl::StatusOr<std::vector<int32_t>> ReadInts(const std::string& name) const;

  // Lets what was read leave resident memory (not the page cache); reading again works as before.
  void DropPages() const;

 private:
  SafetensorsFile(std::string path, const char* data, size_t size, SafetensorsHeader header);

  std::string path_;
  const char* data_;
  size_t size_;
  SafetensorsHeader header_;
};

struct SafetensorsLayout {
  std::string name;
  DType dtype = DType::kF32;  // written as F32, BF16, I32 or U8
  std::vector<int64_t> shape;
};

// Writes a file whose data comes piece by piece, in constant memory. One thread at a time.
class SafetensorsWriter {
 public:
  // Writes the header, with the tensors in the order given and the data starting at a multiple of
  // 64 bytes, into a file beside `path`. The metadata always holds "format": "pt".
  // INVALID_ARGUMENT for a name used twice, reserved or no UTF-8, or a negative extent; else what
  // the file system says, with the path.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, const std::vector<SafetensorsLayout>& tensors,
      std::map<std::string, std::string> metadata = {});
  // Removes what is not finished.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // The next bytes of the data: tensor after tensor, pieces of any size. FAILED_PRECONDITION beyond
  // the last tensor's end.
  absl::Status Append(const void* data, uint64_t bytes);
  // Syncs the file, renames it to `path` and syncs the folder. FAILED_PRECONDITION while bytes are
  // missing.
  absl::Status Finish();

  uint64_t data_bytes() const { return data_bytes_; }  // of all tensors

 private:
  SafetensorsWriter(std::string path, std::string temporary, int fd, uint64_t data_bytes);

  const std::string path_;
  const std::string temporary_;
  int fd_;
  const uint64_t data_bytes_;
  uint64_t written_ = 0;
};

struct SafetensorsTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;  // dense; borrowed
};

// The same for tensors that lie in memory.
absl::Status WriteSafetensors(const std::string& path,
                              const std::vector<SafetensorsTensor>& tensors,
                              std::map<std::string, std::string> metadata = {});

}  // namespace zeroshard
