#include "common/checkpoint/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/names.h"
#include "common/files.h"

namespace zeroshard {
namespace {

std::string HostName() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) return "?";
  return name;
}

// Whoever wrote the file, as messages name it.
std::string Holder(int fd) {
  char text[4096];
  const ssize_t size = pread(fd, text, sizeof(text), 0);
  const auto json = nlohmann::json::parse(text, text + (size > 0 ? size : 0), nullptr, false);
  const auto field = [&json](const char* key) {
    if (!json.is_object() || !json.contains(key)) return std::string("?");
    const auto& value = json[key];
    return value.is_string() ? value.get<std::string>() : value.dump();
  };
  if (!json.is_object()) return "another job, which has not written yet which one it is,";
  return absl::StrCat("job ", field("job"), " (run ", field("run_id"), ", process ", field("pid"),
                      " on host ", field("host"), ")");
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointLock>> CheckpointLock::Take(const std::string& dir,
                                                                     const std::string& job,
                                                                     const std::string& run_id) {
  const std::string path = absl::StrCat(dir, "/", kLockName);
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoError(errno, "open", path);
  std::unique_ptr<CheckpointLock> lock(new CheckpointLock(fd, path));
  while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return ErrnoError(errno, "lock", path);
    return absl::FailedPreconditionError(
        absl::StrCat("checkpoint.dir ", dir, ": ", Holder(fd),
                     " writes there; wait until it has ended, cancel "
                     "it, or give this job another checkpoint.dir"));
  }
  const std::string owner =
      nlohmann::json({{"job", job}, {"run_id", run_id}, {"host", HostName()}, {"pid", getpid()}})
          .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
      "\n";
  if (ftruncate(fd, 0) != 0) return ErrnoError(errno, "write", path);
  const ssize_t wrote = pwrite(fd, owner.data(), owner.size(), 0);
  if (wrote != static_cast<ssize_t>(owner.size())) {
    return ErrnoError(wrote < 0 ? errno : ENOSPC, "write", path);
  }
  return lock;
}

CheckpointLock::~CheckpointLock() { close(fd_); }

absl::Status CheckpointLock::StillHeld() const {
  struct stat ours, there;
  if (fstat(fd_, &ours) == 0 && stat(path_.c_str(), &there) == 0 && ours.st_dev == there.st_dev &&
      ours.st_ino == there.st_ino) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      path_,
      ", the lock of this job, was removed or replaced, so another job may write there; leave "
      "the folder to one job: cancel this one, and go on from its newest checkpoint"));
}

}  // namespace zeroshard
