#include "shard_store/nvme/direct_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/log.h"

namespace zeroshard::nvme {
namespace {

int OpenNew(const std::string& path, int extra, DiskHook* hook) {
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | extra;
  if (hook != nullptr) {
    if (const int error = hook->OnOpen(path, flags)) {
      errno = error;
      return -1;
    }
  }
  return open(path.c_str(), flags, 0600);
}

// UINT64_MAX where the file system does not tell.
uint64_t FreeBytes(int fd) {
  struct statvfs info;
  if (fstatvfs(fd, &info) != 0) return UINT64_MAX;
  return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
}

}  // namespace

absl::StatusOr<std::shared_ptr<DirectFile>> DirectFile::Create(const std::string& path,
                                                               DiskHook* hook) {
  bool direct = true;
  int fd = OpenNew(path, O_DIRECT, hook);
  if (fd < 0 && errno == EINVAL) {
    unlink(path.c_str());  // some file systems create it before they refuse the flag
    direct = false;
    fd = OpenNew(path, 0, hook);
    if (fd >= 0) {
      LogWarning(
          "the file system of ", path,
          " refuses O_DIRECT: what is written there goes through the page cache, which takes "
          "memory beside --memory-limit; give --nvme-dir a folder on ext4 or XFS");
    }
  }
  if (fd < 0) {
    const absl::Status failed = ErrnoError(errno, "create", path);
    return absl::Status(
        failed.code(),
        absl::StrCat(failed.message(),
                     "; let this process make files there (owner, mode, mount options), or give "
                     "--nvme-dir another folder, and start the store again"));
  }
  return std::shared_ptr<DirectFile>(new DirectFile(fd, path, direct, hook));
}

DirectFile::~DirectFile() { close(fd_); }

absl::Status DirectFile::Allocate(uint64_t bytes) {
  int error = hook_ == nullptr ? 0 : hook_->OnAllocate(path_, bytes);
  // Some file systems take all there is before they say that it is not enough, so that whatever
  // else writes to the disk fails meanwhile.
  uint64_t free = FreeBytes(fd_);
  if (error == 0 && bytes > free) error = ENOSPC;
  if (error == 0) {
    do {
      error = fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    } while (error == EINTR);
    if (error != 0 && ftruncate(fd_, 0) == 0) free = FreeBytes(fd_);
  }
  if (error == 0) return absl::OkStatus();
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "cannot reserve ", bytes, " bytes for ", path_, ": ",
        ErrnoError(error, "allocate", path_).message(), "; ",
        free == UINT64_MAX ? std::string("an unknown number of") : absl::StrCat(free),
        " bytes are free there. Free some, give --nvme-dir a larger disk, or add stores"));
  }
  if (error == EOPNOTSUPP || error == ENOSYS) {
    return absl::UnimplementedError(
        absl::StrCat("the file system of ", path_,
                     " cannot reserve space (fallocate), so that a full disk would be met in the "
                     "middle of a step; give --nvme-dir a folder on ext4, XFS or tmpfs"));
  }
  return ErrnoError(error, absl::StrCat("reserve ", bytes, " bytes for"), path_);
}

absl::Status DirectFile::Lock() {
  while (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EINTR) return ErrnoError(errno, "lock", path_);
  }
  return absl::OkStatus();
}

}  // namespace zeroshard::nvme
