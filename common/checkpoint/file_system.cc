#include "common/checkpoint/file_system.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>

#include "common/files.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

// One write to the disk, at a multiple of itself. Also the memory that a file being written takes.
constexpr size_t kBlock = size_t{4} << 20;
// So much may wait for the disk in the page cache; what is older is waited for and dropped, so that
// a save neither pushes out what training uses nor leaves everything to the sync at the end.
constexpr uint64_t kWindow = 16 * kBlock;

struct FreeDeleter {
  void operator()(char* memory) const { std::free(memory); }
};

class RealFile : public WritableFile {
 public:
  RealFile(int fd, std::string path, std::unique_ptr<char, FreeDeleter> buffer)
      : fd_(fd), path_(std::move(path)), buffer_(std::move(buffer)) {}
  ~RealFile() override {
    if (fd_ >= 0) close(fd_);
  }

  absl::Status Append(const void* data, size_t bytes) override {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
      if (used_ == 0 && bytes >= kBlock) {
        ZS_RETURN_IF_ERROR(WriteBlock(at, kBlock));
        at += kBlock;
        bytes -= kBlock;
        continue;
      }
      const size_t part = std::min(bytes, kBlock - used_);
      std::memcpy(buffer_.get() + used_, at, part);
      used_ += part;
      at += part;
      bytes -= part;
      if (used_ == kBlock) ZS_RETURN_IF_ERROR(WriteBlock(buffer_.get(), std::exchange(used_, 0)));
    }
    return absl::OkStatus();
  }

  absl::Status SyncAndClose() override {
    ZS_RETURN_IF_ERROR(WriteBlock(buffer_.get(), std::exchange(used_, 0)));
    if (fsync(fd_) != 0) return ErrnoError(errno, "sync", path_);
    // After an error the descriptor is gone all the same.
    if (close(std::exchange(fd_, -1)) != 0) return ErrnoError(errno, "close", path_);
    return absl::OkStatus();
  }

 private:
  absl::Status WriteBlock(const char* data, size_t bytes) {
    const uint64_t begin = written_;
    while (bytes > 0) {
      const ssize_t wrote = write(fd_, data, bytes);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return ErrnoError(wrote < 0 ? errno : EIO, "write", path_);
      data += wrote;
      bytes -= static_cast<size_t>(wrote);
      written_ += static_cast<uint64_t>(wrote);
    }
    // Both are hints: a file system that knows neither writes all the same, and what went wrong
    // here is what fsync says.
    sync_file_range(fd_, static_cast<off64_t>(begin), static_cast<off64_t>(written_ - begin),
                    SYNC_FILE_RANGE_WRITE);
    if (begin >= kWindow && begin % kBlock == 0) {
      const auto old = static_cast<off64_t>(begin - kWindow);
      sync_file_range(
          fd_, old, kBlock,
          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
      posix_fadvise(fd_, old, kBlock, POSIX_FADV_DONTNEED);
    }
    return absl::OkStatus();
  }

  int fd_;
  const std::string path_;
  const std::unique_ptr<char, FreeDeleter> buffer_;  // kBlock
  size_t used_ = 0;
  uint64_t written_ = 0;
};

class RealFileSystem : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    std::unique_ptr<char, FreeDeleter> buffer(static_cast<char*>(std::aligned_alloc(4096, kBlock)));
    if (buffer == nullptr) return ErrnoError(ENOMEM, "create", path);
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) return ErrnoError(errno, "create", path);
    return std::make_unique<RealFile>(fd, path, std::move(buffer));
  }

  absl::Status MakeFolder(const std::string& path) override { return MakeFolders(path); }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (std::rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
    return ErrnoError(errno, "rename", from + " to " + to);
  }

  absl::Status RemoveAll(const std::string& path) override {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) return ErrnoError(error.value(), "remove", path);
    return absl::OkStatus();
  }

  absl::Status SyncFolder(const std::string& path) override {
    const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return ErrnoError(errno, "open the folder", path);
    const int result = fsync(fd);
    const int error = errno;
    close(fd);
    // EINVAL: a file system whose folders cannot be synced.
    if (result != 0 && error != EINVAL) return ErrnoError(error, "sync the folder", path);
    return absl::OkStatus();
  }
};

}  // namespace

FileSystem& FileSystem::Real() {
  static RealFileSystem real;
  return real;
}

}  // namespace zeroshard
