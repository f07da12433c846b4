#include "shard_store/nvme/stale_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/descriptor.h"
#include "common/files.h"
#include "common/log.h"
#include "common/random_id.h"
#include "common/status_macros.h"
#include "shard_store/nvme/chunk_layout.h"

namespace zeroshard::nvme {
namespace {

constexpr char kPrefix[] = "zeroshard-";
constexpr char kSuffix[] = ".chunks";

absl::Status LockFolder(int fd, const std::string& dir, absl::Duration timeout) {
  const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout);
  while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EINTR && errno != EWOULDBLOCK) return ErrnoError(errno, "lock", dir);
    if (std::chrono::steady_clock::now() > until) {
      return absl::DeadlineExceededError(
          absl::StrCat("another process has held the lock of --nvme-dir ", dir, " for ",
                       absl::FormatDuration(timeout), " (see 'lsof ", dir, "'); end it, or use ",
                       "another folder"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return absl::OkStatus();
}

// What a file that is about to go held, as far as its header tells.
std::string Contents(int fd) {
  std::vector<char> page(kHeaderBytes);
  const ssize_t got = pread(fd, page.data(), page.size(), 0);
  const auto header =
      DecodeHeader(absl::MakeConstSpan(page).first(static_cast<size_t>(std::max<ssize_t>(got, 0))));
  if (!header.ok()) return "without a whole header";
  return absl::StrCat("of run ", header->run_id, ", epoch ", header->epoch, ", ",
                      header->file_bytes, " bytes");
}

absl::Status RemoveUnheld(const std::string& dir) {
  DIR* const folder = opendir(dir.c_str());
  if (folder == nullptr) return ErrnoError(errno, "read the folder", dir);
  std::vector<std::string> names;
  while (const struct dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (absl::StartsWith(name, kPrefix) && absl::EndsWith(name, kSuffix)) names.push_back(name);
  }
  closedir(folder);
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(dir, "/", name);
    const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    struct stat info;
    if (file.get() < 0 || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
    if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) continue;  // its store lives
    const std::string contents = Contents(file.get());
    if (unlink(path.c_str()) != 0) {
      LogWarning(ErrnoError(errno, "remove", path).message(), ": a store that has ended left it (",
                 contents, "), and nothing will read it; remove it by hand to have its space");
      continue;
    }
    LogInfo("removed ", path, " (", contents, "): the store that made it has ended");
  }
  return absl::OkStatus();
}

absl::Status CheckRunId(const std::string& run_id) {
  const bool fine = !run_id.empty() && run_id.size() <= 64 &&
                    std::all_of(run_id.begin(), run_id.end(), [](unsigned char c) {
                      return std::isalnum(c) || c == '.' || c == '_' || c == '-';
                    });
  if (fine) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("run id '", run_id,
                   "' cannot name a file: wanted are 1 to 64 letters, digits, '.', '_', '-'"));
}

}  // namespace

absl::Status RemoveStaleFiles(const std::string& dir, absl::Duration timeout) {
  const Descriptor folder(open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) return ErrnoError(errno, "open the folder", dir);
  ZS_RETURN_IF_ERROR(LockFolder(folder.get(), dir, timeout));
  return RemoveUnheld(dir);
}

absl::StatusOr<std::shared_ptr<DirectFile>> CreateChunkFile(const std::string& dir,
                                                            const std::string& run_id,
                                                            DiskHook* hook,
                                                            absl::Duration timeout) {
  ZS_RETURN_IF_ERROR(CheckRunId(run_id));
  const Descriptor folder(open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) return ErrnoError(errno, "open the folder", dir);
  ZS_RETURN_IF_ERROR(LockFolder(folder.get(), dir, timeout));
  ZS_RETURN_IF_ERROR(RemoveUnheld(dir));
  const std::string path =
      absl::StrCat(dir, "/", kPrefix, run_id, "-", RandomId().substr(0, 16), kSuffix);
  ZS_ASSIGN_OR_RETURN(std::shared_ptr<DirectFile> file, DirectFile::Create(path, hook));
  if (absl::Status status = file->Lock(); !status.ok()) {
    unlink(path.c_str());
    return status;
  }
  return file;
}

}  // namespace zeroshard::nvme
