// The bytes of one file, for reading at random: small files are copied (a folder may hold more of
// them than a process may map), larger ones are mapped, so that their pages can be dropped and are
// shared by all workers of a host.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace zeroshard {

// Immutable, movable. A mapped file must not be shortened while it is open (the process would get
// SIGBUS); what is written into it shows through.
class FileBytes {
 public:
  // NOT_FOUND, PERMISSION_DENIED, INVALID_ARGUMENT (not a regular file), INTERNAL (cannot be read)
  // name the file and the system's reason. Files of at least `map_from` bytes are mapped.
  static absl::StatusOr<FileBytes> Open(const std::string& path, int64_t map_from = 1 << 20);

  // Bytes that are no file's.
  static FileBytes Of(std::string content);

  FileBytes(FileBytes&& other) noexcept;
  FileBytes& operator=(FileBytes&& other) noexcept;
  ~FileBytes();

  absl::Span<const uint8_t> bytes() const { return {data(), static_cast<size_t>(size_)}; }
  // Says that the pages read so far are not needed soon: they leave this process's resident memory.
  void DropPages() const;

 private:
  FileBytes() = default;
  const uint8_t* data() const;

  std::string copy_;
  void* map_ = nullptr;
  int64_t size_ = 0;
};

// The status for a failed system call on a file: its code by `error` (an errno), and its text.
absl::Status FileError(int error, const std::string& what, const std::string& path);

}  // namespace zeroshard
