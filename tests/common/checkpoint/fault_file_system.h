// A file system that ends the process, loses what was not synced, or runs out of space at an
// operation that a test chooses. Files are written through at once, so that a torn one is on the
// disk; syncs are only noted, because a process that dies loses nothing the kernel has.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/checkpoint/file_system.h"
#include "common/files.h"

namespace zeroshard {

enum class Fault {
  kNone,
  kKillBefore,  // SIGKILL instead of the operation
  kKillAfter,   // SIGKILL when it is done
  kPowerCut,    // SIGKILL when it is done, and whatever was not synced is lost
  kFail,        // this operation alone: an input/output error
  kFull,        // from this operation on, nothing more can be written; removing and renaming can
};

class FaultFileSystem : public FileSystem {
 public:
  FaultFileSystem() = default;
  FaultFileSystem(Fault fault, int at) : fault_(fault), at_(at) {}

  // So far, counted from 1.
  int operations() const { return operations_; }

  // Takes back whatever was not synced.
  void LoseUnsynced() {
    for (const int fd : unsynced_files_) {
      struct stat status;
      if (fstat(fd, &status) != 0 || ftruncate(fd, status.st_size / 2) != 0) _exit(99);
    }
    for (auto at = unsynced_renames_.rbegin(); at != unsynced_renames_.rend(); ++at) {
      if (std::rename(at->second.c_str(), at->first.c_str()) != 0) _exit(98);
    }
    for (const std::string& entry : unsynced_entries_) std::filesystem::remove_all(entry);
  }

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    std::unique_ptr<WritableFile> file;
    absl::Status status = Do(true, path, [&] {
      const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
      if (fd < 0) return ErrnoError(errno, "create", path);
      unsynced_files_.insert(fd);
      unsynced_entries_.insert(path);
      file = std::make_unique<File>(this, fd, path);
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return file;
  }
  absl::Status MakeFolder(const std::string& path) override {
    return Do(true, path, [&] {
      std::filesystem::path at = path;
      while (!at.empty() && !std::filesystem::exists(at)) {
        unsynced_entries_.insert(at.string());
        at = at.parent_path();
      }
      return Real().MakeFolder(path);
    });
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Do(false, from, [&] {
      absl::Status status = Real().Rename(from, to);
      if (status.ok()) unsynced_renames_.push_back({from, to});
      return status;
    });
  }
  absl::Status RemoveAll(const std::string& path) override {
    return Do(false, path, [&] { return Real().RemoveAll(path); });
  }
  absl::Status SyncFolder(const std::string& path) override {
    return Do(false, path, [&] {
      std::erase_if(unsynced_entries_, [&](const std::string& entry) {
        return std::filesystem::path(entry).parent_path() == path;
      });
      std::erase_if(unsynced_renames_, [&](const auto& rename) {
        return std::filesystem::path(rename.second).parent_path() == path;
      });
      return absl::OkStatus();
    });
  }

 private:
  class File : public WritableFile {
   public:
    File(FaultFileSystem* owner, int fd, std::string path)
        : owner_(owner), fd_(fd), path_(std::move(path)) {}
    ~File() override {
      // What was closed without a sync is still lost at a power cut.
      if (owner_->unsynced_files_.erase(fd_) > 0) owner_->unsynced_files_.insert(dup(fd_));
      close(fd_);
    }
    absl::Status Append(const void* data, size_t bytes) override {
      return owner_->Do(true, path_, [&] {
        // Half of it, so that a file may be torn within an operation as well.
        const size_t half = bytes / 2;
        const auto* at = static_cast<const char*>(data);
        for (const auto& [begin, size] :
             {std::pair(at, half), std::pair(at + half, bytes - half)}) {
          if (write(fd_, begin, size) != static_cast<ssize_t>(size)) {
            return ErrnoError(errno, "write", path_);
          }
        }
        return absl::OkStatus();
      });
    }
    absl::Status SyncAndClose() override {
      return owner_->Do(true, path_, [&] {
        owner_->unsynced_files_.erase(fd_);
        return absl::OkStatus();
      });
    }

   private:
    FaultFileSystem* const owner_;
    const int fd_;
    const std::string path_;
  };

  template <typename Operation>
  absl::Status Do(bool writes, const std::string& path, const Operation& operation) {
    ++operations_;
    const bool now = operations_ == at_;
    if (now && fault_ == Fault::kKillBefore) raise(SIGKILL);
    if (now && fault_ == Fault::kFail) return ErrnoError(EIO, "change", path);
    if (writes && fault_ == Fault::kFull && operations_ >= at_) {
      return ErrnoError(ENOSPC, "write", path);
    }
    absl::Status status = operation();
    if (now && fault_ == Fault::kKillAfter) raise(SIGKILL);
    if (now && fault_ == Fault::kPowerCut) {
      LoseUnsynced();
      raise(SIGKILL);
    }
    return status;
  }

  const Fault fault_ = Fault::kNone;
  const int at_ = 0;
  int operations_ = 0;
  std::set<int> unsynced_files_;
  std::set<std::string> unsynced_entries_;
  std::vector<std::pair<std::string, std::string>> unsynced_renames_;
};

}  // namespace zeroshard
