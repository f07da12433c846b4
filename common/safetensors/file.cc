// Opening, mapping and reading a file.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/files.h"
#include "common/plan/nearest.h"
#include "common/safetensors/float_types.h"
#include "common/safetensors/safetensors.h"

namespace zeroshard {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

SafetensorsFile::SafetensorsFile(std::string path, const char* data, size_t size,
                                 SafetensorsHeader header)
    : path_(std::move(path)), data_(data), size_(size), header_(std::move(header)) {}

SafetensorsFile::~SafetensorsFile() { munmap(const_cast<char*>(data_), size_); }

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoError(errno, "open", path);
  const absl::Cleanup close_file = [fd] { close(fd); };
  struct stat status;
  if (fstat(fd, &status) != 0) return ErrnoError(errno, "examine", path);
  if (!S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  const auto size = static_cast<size_t>(status.st_size);
  if (size == 0) return ParseSafetensorsHeader("", 0, path).status();
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (data == MAP_FAILED) return ErrnoError(errno, "map", path);
  const char* bytes = static_cast<const char*>(data);
  absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(absl::string_view(bytes, size), size, path);
  if (!header.ok()) {
    munmap(data, size);
    return header.status();
  }
  return std::unique_ptr<SafetensorsFile>(
      new SafetensorsFile(path, bytes, size, *std::move(header)));
}

absl::StatusOr<const SafetensorsEntry*> SafetensorsFile::Find(const std::string& name) const {
  const auto found = header_.tensors.find(name);
  if (found != header_.tensors.end()) return &found->second;
  std::vector<std::string> names;
  for (const auto& [known, tensor] : header_.tensors) names.push_back(known);
  return absl::NotFoundError(absl::StrCat(path_, " has no tensor \"", name, "\" among its ",
                                          names.size(), "; the nearest names are ",
                                          absl::StrJoin(NearestNames(name, names, 3), ", ")));
}

absl::string_view SafetensorsFile::Bytes(const SafetensorsEntry& tensor) const {
  return absl::string_view(data_ + header_.data_offset + tensor.begin, tensor.end - tensor.begin);
}

absl::StatusOr<std::vector<float>> SafetensorsFile::ReadFloats(const std::string& name) const {
  absl::StatusOr<const SafetensorsEntry*> tensor = Find(name);
  if (!tensor.ok()) return tensor.status();
  const absl::string_view bytes = Bytes(**tensor);
  std::vector<float> values(static_cast<size_t>((*tensor)->elements()));
  const std::optional<FloatType> type = FloatTypeOf((*tensor)->dtype);
  if (!type) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor \"", name, "\" is of type ",
                                                   (*tensor)->dtype, "; wanted F32, F16 or BF16"));
  }
  ToFloats(*type, bytes.data(), (*tensor)->elements(), values.data());
  return values;
}

absl::StatusOr<std::vector<int32_t>> SafetensorsFile::ReadInts(const std::string& name) const {
  absl::StatusOr<const SafetensorsEntry*> tensor = Find(name);
  if (!tensor.ok()) return tensor.status();
  if ((*tensor)->dtype != "I32") {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor \"", name, "\" is of type ",
                                                   (*tensor)->dtype, "; wanted I32"));
  }
  const absl::string_view bytes = Bytes(**tensor);
  std::vector<int32_t> values(static_cast<size_t>((*tensor)->elements()));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

void SafetensorsFile::DropPages() const { madvise(const_cast<char*>(data_), size_, MADV_DONTNEED); }

}  // namespace zeroshard
