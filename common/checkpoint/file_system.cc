#include "common/checkpoint/file_system.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "common/files.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

// Small pieces are collected up to this size; larger ones go to the kernel from where they are.
constexpr size_t kBuffer = size_t{256} << 10;
// The disk is told to write when so much has come together.
constexpr uint64_t kBlock = uint64_t{8} << 20;
// So much may wait for the disk in the page cache; what is older is waited for and dropped, so that
// a save neither pushes out what training uses nor leaves everything to the sync at the end.
constexpr uint64_t kWindow = 8 * kBlock;

class RealFile : public WritableFile {
 public:
  RealFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) { buffer_.reserve(kBuffer); }
  ~RealFile() override {
    if (fd_ >= 0) close(fd_);
  }

  absl::Status Append(const void* data, size_t bytes) override {
    const char* at = static_cast<const char*>(data);
    if (buffer_.size() + bytes <= kBuffer) {
      buffer_.insert(buffer_.end(), at, at + bytes);
      return absl::OkStatus();
    }
    ZS_RETURN_IF_ERROR(Flush());
    if (bytes < kBuffer) {
      buffer_.insert(buffer_.end(), at, at + bytes);
      return absl::OkStatus();
    }
    return Write(at, bytes);
  }

  absl::Status SyncAndClose() override {
    ZS_RETURN_IF_ERROR(Flush());
    if (fsync(fd_) != 0) return ErrnoError(errno, "sync", path_);
    // After an error the descriptor is gone all the same.
    if (close(std::exchange(fd_, -1)) != 0) return ErrnoError(errno, "close", path_);
    return absl::OkStatus();
  }

 private:
  absl::Status Flush() {
    ZS_RETURN_IF_ERROR(Write(buffer_.data(), buffer_.size()));
    buffer_.clear();
    return absl::OkStatus();
  }

  absl::Status Write(const char* data, size_t bytes) {
    while (bytes > 0) {
      const ssize_t wrote = write(fd_, data, std::min<uint64_t>(bytes, kBlock));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return ErrnoError(wrote < 0 ? errno : EIO, "write", path_);
      data += wrote;
      bytes -= static_cast<size_t>(wrote);
      written_ += static_cast<uint64_t>(wrote);
      while (written_ - started_ >= kBlock) StartBlock();
    }
    return absl::OkStatus();
  }

  // Hints: a file system that knows neither writes all the same, and what goes wrong here is what
  // fsync says.
  void StartBlock() {
    sync_file_range(fd_, static_cast<off64_t>(started_), kBlock, SYNC_FILE_RANGE_WRITE);
    if (started_ >= kWindow) {
      const auto old = static_cast<off64_t>(started_ - kWindow);
      sync_file_range(
          fd_, old, kBlock,
          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
      posix_fadvise(fd_, old, kBlock, POSIX_FADV_DONTNEED);
    }
    started_ += kBlock;
  }

  int fd_;
  const std::string path_;
  std::vector<char> buffer_;
  uint64_t written_ = 0;
  uint64_t started_ = 0;  // bytes that the disk was told to write, a multiple of kBlock
};

class RealFileSystem : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) return ErrnoError(errno, "create", path);
    return std::make_unique<RealFile>(fd, path);
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
