#include "worker/data/file_bytes.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/descriptor.h"

namespace zeroshard {

absl::Status FileError(int error, const std::string& what, const std::string& path) {
  const std::string message = absl::StrCat("cannot ", what, " ", path, ": ", std::strerror(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(message);
    default:
      return absl::InternalError(message);
  }
}

absl::StatusOr<FileBytes> FileBytes::Open(const std::string& path, int64_t map_from) {
  // Non-blocking, so that a pipe of that name cannot hang the open.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) return FileError(errno, "open", path);
  struct stat info;
  if (fstat(file.get(), &info) != 0) return FileError(errno, "look at", path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  FileBytes result;
  result.size_ = info.st_size;
  if (result.size_ > 0 && result.size_ >= map_from) {
    void* map = mmap(nullptr, result.size_, PROT_READ, MAP_SHARED, file.get(), 0);
    if (map == MAP_FAILED) return FileError(errno, "map", path);
    result.map_ = map;
    return result;
  }
  result.copy_.resize(result.size_);
  int64_t done = 0;
  while (done < result.size_) {
    const ssize_t n = pread(file.get(), result.copy_.data() + done, result.size_ - done, done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError(errno, "read", path);
    if (n == 0) {
      return absl::InternalError(absl::StrCat(path, " became shorter while it was read: ", done,
                                              " bytes, not ", result.size_));
    }
    done += n;
  }
  return result;
}

FileBytes FileBytes::Of(std::string content) {
  FileBytes result;
  result.copy_ = std::move(content);
  result.size_ = static_cast<int64_t>(result.copy_.size());
  return result;
}

FileBytes::FileBytes(FileBytes&& other) noexcept { *this = std::move(other); }

FileBytes& FileBytes::operator=(FileBytes&& other) noexcept {
  std::swap(copy_, other.copy_);
  std::swap(map_, other.map_);
  std::swap(size_, other.size_);
  return *this;
}

FileBytes::~FileBytes() {
  if (map_ != nullptr) munmap(map_, size_);
}

void FileBytes::DropPages() const {
  if (map_ != nullptr) madvise(map_, size_, MADV_DONTNEED);
}

const uint8_t* FileBytes::data() const {
  return static_cast<const uint8_t*>(map_ != nullptr ? map_ : copy_.data());
}

}  // namespace zeroshard
