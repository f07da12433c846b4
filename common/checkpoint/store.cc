#include "common/checkpoint/store.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/checkpoint/folder_lock.h"
#include "common/checkpoint/names.h"
#include "common/checkpoint/reader.h"
#include "common/files.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

bool IsThere(const std::string& path) {
  struct stat status;
  return lstat(path.c_str(), &status) == 0;
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Makes the way to `dir` last, from the root of its file system down to its own entry. Another
// process may have made any of these folders, a moment ago or before it was killed, so all are
// synced, which costs nothing where there is nothing to write.
absl::Status SyncAbove(FileSystem* files, const std::string& dir) {
  std::error_code ignored;
  std::string at = std::filesystem::absolute(dir, ignored).lexically_normal().string();
  while (at.size() > 1 && at.back() == '/') at.pop_back();
  struct stat here, above;
  while (at.size() > 1 && stat(at.c_str(), &here) == 0) {
    at = FolderOf(at);
    if (stat(at.c_str(), &above) != 0 || above.st_dev != here.st_dev) break;
    const absl::Status status = files->SyncFolder(at);
    // A folder that this user may not read is none that this user has made.
    if (status.ok() || absl::IsPermissionDenied(status)) continue;
    return absl::Status(status.code(),
                        absl::StrCat("checkpoint.dir ", dir, ": ", status.message()));
  }
  return absl::OkStatus();
}

absl::Status WriteFile(FileSystem* files, const std::string& path, absl::string_view text) {
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, files->Create(path));
  ZS_RETURN_IF_ERROR(file->Append(text.data(), text.size()));
  return file->SyncAndClose();
}

class Store : public CheckpointStore {
 public:
  Store(FileSystem* files, const CheckpointStoreOptions& options,
        std::unique_ptr<CheckpointLock> lock)
      : files_(files), options_(options), lock_(std::move(lock)) {}

  absl::Status Prepare(const std::optional<FoundCheckpoint>& resumed);

  absl::StatusOr<std::string> Begin(uint64_t step) override;
  absl::StatusOr<std::string> Complete(const Manifest& manifest) override;
  void Abandon(uint64_t step) override;

 private:
  absl::Status Sweep();
  // Refuses what is another run's.
  absl::Status CheckOwner(const std::vector<CheckpointSummary>& there,
                          const std::optional<FoundCheckpoint>& resumed) const;
  absl::Status MoveAside(const std::string& path);
  absl::Status CheckFiles(const std::string& folder, const Manifest& manifest) const;
  absl::Status SyncFolders(const std::string& folder, const Manifest& manifest);
  absl::Status PrepareLatest(uint64_t step);
  absl::Status ReplaceLatest();
  void DeleteOld(uint64_t newest);
  absl::Status Delete(uint64_t step);

  std::string PathOf(uint64_t step) const {
    return absl::StrCat(options_.dir, "/", CheckpointName(step));
  }

  FileSystem* const files_;
  const CheckpointStoreOptions options_;
  const std::unique_ptr<CheckpointLock> lock_;
};

absl::Status Store::Sweep() {
  std::error_code error;
  std::vector<std::string> leftovers;
  for (std::filesystem::directory_iterator it(options_.dir, error), end; !error && it != end;
       it.increment(error)) {
    if (IsLeftover(it->path().filename().string())) leftovers.push_back(it->path().string());
  }
  if (error) return ErrnoError(error.value(), "list", options_.dir);
  for (const std::string& path : leftovers) {
    LogInfo("checkpoints: removes ", path, ", which a save that did not end left behind");
    ZS_RETURN_IF_ERROR(files_->RemoveAll(path));
  }
  return absl::OkStatus();
}

absl::Status Store::CheckOwner(const std::vector<CheckpointSummary>& there,
                               const std::optional<FoundCheckpoint>& resumed) const {
  if (resumed && CanonicalPath(FolderOf(resumed->path)) == CanonicalPath(options_.dir)) {
    return absl::OkStatus();
  }
  // Not by run ids, which another coordinator may have given out too: what this run has written it
  // goes on from.
  for (auto at = there.rbegin(); at != there.rend(); ++at) {
    if (!at->complete) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "checkpoint.dir ", options_.dir, " holds complete checkpoints of another run, the newest ",
        CheckpointName(at->step), " of run ", at->run_id,
        "; go on from it with --resume-from latest, name another checkpoint.dir, or remove them"));
  }
  return absl::OkStatus();
}

absl::Status Store::MoveAside(const std::string& path) {
  std::string to = absl::StrCat(path, ".aside");
  for (int i = 2; IsThere(to); ++i) to = absl::StrCat(path, ".aside-", i);
  LogWarning("checkpoints: ", path, " is not on the way this run goes on; it is kept as ", to);
  ZS_RETURN_IF_ERROR(files_->Rename(path, to));
  // At once: whatever fails next, a power cut must not bring it back.
  return files_->SyncFolder(options_.dir);
}

absl::Status Store::Prepare(const std::optional<FoundCheckpoint>& resumed) {
  ZS_RETURN_IF_ERROR(Sweep());
  ZS_ASSIGN_OR_RETURN(const std::vector<CheckpointSummary> there, ListCheckpoints(options_.dir));
  ZS_RETURN_IF_ERROR(CheckOwner(there, resumed));
  bool moved_latest = false;
  for (const CheckpointSummary& checkpoint : there) {
    if (resumed && checkpoint.step <= resumed->manifest.step) continue;
    ZS_RETURN_IF_ERROR(MoveAside(checkpoint.path));
    moved_latest = moved_latest || checkpoint.latest;
  }
  if (!moved_latest) return absl::OkStatus();
  if (resumed && IsThere(PathOf(resumed->manifest.step))) {
    ZS_RETURN_IF_ERROR(PrepareLatest(resumed->manifest.step));
    return ReplaceLatest();
  }
  ZS_RETURN_IF_ERROR(files_->RemoveAll(absl::StrCat(options_.dir, "/", kLatestName)));
  return files_->SyncFolder(options_.dir);
}

absl::StatusOr<std::string> Store::Begin(uint64_t step) {
  ZS_RETURN_IF_ERROR(lock_->StillHeld());
  const std::string path = PathOf(step);
  if (IsThere(path)) {
    if (const auto found = FindCheckpoint(path); found.ok()) {
      return absl::AlreadyExistsError(absl::StrCat(path, " is complete already"));
    }
    ZS_RETURN_IF_ERROR(MoveAside(path));
  }
  const std::string folder = CollectFolder(options_.dir, step);
  ZS_RETURN_IF_ERROR(files_->RemoveAll(folder));
  ZS_RETURN_IF_ERROR(files_->MakeFolder(folder));
  return folder;
}

absl::Status Store::CheckFiles(const std::string& folder, const Manifest& manifest) const {
  for (const CheckpointFile& file : manifest.files) {
    const std::string path = absl::StrCat(folder, "/", file.name);
    struct stat status;
    if (stat(path.c_str(), &status) != 0) {
      return absl::Status(
          absl::StatusCode::kFailedPrecondition,
          absl::StrCat(ErrnoError(errno, "find", path).message(),
                       "; a rank wrote it: is checkpoint.dir one folder for all hosts?"));
    }
    if (static_cast<uint64_t>(status.st_size) != file.bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " has ", status.st_size, " bytes; its rank wrote ", file.bytes,
                       ": is checkpoint.dir one folder for all hosts?"));
    }
  }
  return absl::OkStatus();
}

absl::Status Store::SyncFolders(const std::string& folder, const Manifest& manifest) {
  std::set<std::string> folders = {folder};
  for (const CheckpointFile& file : manifest.files) {
    for (std::string at = file.name; at.find('/') != std::string::npos;) {
      at = FolderOf(at);
      folders.insert(absl::StrCat(folder, "/", at));
    }
  }
  // Longest first, so that an entry is safe before the folder it is in.
  for (auto at = folders.rbegin(); at != folders.rend(); ++at) {
    ZS_RETURN_IF_ERROR(files_->SyncFolder(*at));
  }
  return absl::OkStatus();
}

absl::Status Store::PrepareLatest(uint64_t step) {
  const std::string path = LatestTemporary(options_.dir);
  ZS_RETURN_IF_ERROR(files_->RemoveAll(path));
  return WriteFile(files_, path, absl::StrCat(CheckpointName(step), "\n"));
}

absl::Status Store::ReplaceLatest() {
  ZS_RETURN_IF_ERROR(
      files_->Rename(LatestTemporary(options_.dir), absl::StrCat(options_.dir, "/", kLatestName)));
  return files_->SyncFolder(options_.dir);
}

absl::StatusOr<std::string> Store::Complete(const Manifest& manifest) {
  const std::string folder = CollectFolder(options_.dir, manifest.step);
  const std::string path = PathOf(manifest.step);
  const std::string where = absl::StrCat(folder, "/", kManifestName);
  const std::string text = FormatManifest(manifest);
  // What cannot be read back is found now and not when it is needed.
  ZS_RETURN_IF_ERROR(ParseManifest(text, where).status());
  ZS_RETURN_IF_ERROR(CheckFiles(folder, manifest));
  ZS_RETURN_IF_ERROR(WriteFile(files_, where, text));
  ZS_RETURN_IF_ERROR(SyncFolders(folder, manifest));
  // All that needs space on the disk is there before the rename that makes the checkpoint one.
  ZS_RETURN_IF_ERROR(PrepareLatest(manifest.step));
  ZS_RETURN_IF_ERROR(files_->Rename(folder, path));
  ZS_RETURN_IF_ERROR(files_->SyncFolder(options_.dir));
  if (absl::Status status = ReplaceLatest(); !status.ok()) {
    LogWarning("checkpoints: ", path, " is complete, but ", options_.dir, "/", kLatestName,
               " could not be replaced: ", status.message());
  }
  DeleteOld(manifest.step);
  return path;
}

void Store::DeleteOld(uint64_t newest) {
  if (options_.keep_last == 0) return;
  const absl::StatusOr<std::vector<CheckpointSummary>> there = ListCheckpoints(options_.dir);
  absl::Status status = there.status();
  if (there.ok()) {
    uint32_t kept = 0;
    for (auto at = there->rbegin(); at != there->rend() && status.ok(); ++at) {
      if (!at->complete || at->step > newest || kept++ < options_.keep_last) continue;
      if (options_.keep_every != 0 && at->step % options_.keep_every == 0) continue;
      status = Delete(at->step);
    }
  }
  if (!status.ok()) {
    LogWarning("checkpoints: an old one could not be deleted: ", status.message());
  }
}

absl::Status Store::Delete(uint64_t step) {
  const std::string old = DeleteFolder(options_.dir, step);
  ZS_RETURN_IF_ERROR(files_->RemoveAll(old));
  ZS_RETURN_IF_ERROR(files_->Rename(PathOf(step), old));
  // Its name must be gone for good before the first of its files is.
  ZS_RETURN_IF_ERROR(files_->SyncFolder(options_.dir));
  return files_->RemoveAll(old);
}

void Store::Abandon(uint64_t step) {
  for (const std::string& path :
       {CollectFolder(options_.dir, step), LatestTemporary(options_.dir)}) {
    if (absl::Status status = files_->RemoveAll(path); !status.ok()) {
      LogWarning("checkpoints: an abandoned save could not be removed: ", status.message());
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointStore>> CheckpointStore::Open(
    FileSystem* files, const CheckpointStoreOptions& given) {
  CheckpointStoreOptions options = given;
  while (options.dir.size() > 1 && options.dir.back() == '/') options.dir.pop_back();
  if (options.dir.empty()) {
    return absl::InvalidArgumentError("checkpoint.dir is empty; wanted a folder");
  }
  std::optional<FoundCheckpoint> resumed;
  if (!options.resumed_from.empty()) {
    ZS_ASSIGN_OR_RETURN(resumed, FindCheckpoint(options.resumed_from));
  }
  ZS_RETURN_IF_ERROR(files->MakeFolder(options.dir));
  ZS_RETURN_IF_ERROR(SyncAbove(files, options.dir));
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<CheckpointLock> lock,
                      CheckpointLock::Take(options.dir, options.job, options.run_id));
  auto store = std::make_unique<Store>(files, options, std::move(lock));
  ZS_RETURN_IF_ERROR(store->Prepare(resumed));
  return store;
}

}  // namespace zeroshard
