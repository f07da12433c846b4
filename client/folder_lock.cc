#include "client/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/files.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<FolderLock>> FolderLock::Take(const std::string& folder) {
  const std::string path = folder + "/local.lock";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoError(errno, "cannot write", path);
  std::unique_ptr<FolderLock> lock(new FolderLock(fd));
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoError(errno, "cannot lock", path);
    char owner[32] = {};
    const ssize_t size = pread(fd, owner, sizeof(owner) - 1, 0);
    return absl::FailedPreconditionError(absl::StrCat(
        folder, ": another zeroshard local runs there",
        size > 0 ? absl::StrCat(" (process ", absl::StripSuffix(owner, "\n"), ")") : "",
        "; wait for it, or name another folder with --workdir DIR"));
  }
  const std::string owner = absl::StrCat(getpid(), "\n");
  if (ftruncate(fd, 0) != 0 || pwrite(fd, owner.data(), owner.size(), 0) < 0) {
    return ErrnoError(errno, "cannot write", path);
  }
  return lock;
}

FolderLock::~FolderLock() { close(fd_); }

}  // namespace zeroshard
