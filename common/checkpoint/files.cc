#include "common/checkpoint/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <set>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/checkpoint/names.h"
#include "common/checksum.h"
#include "common/files.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

// What is summed at a time: little enough to be cached still when it is.
constexpr size_t kPart = size_t{1} << 20;
constexpr size_t kMaxAsset = size_t{256} << 20;

}  // namespace

absl::StatusOr<CheckpointFile> DescribeFile(const std::string& folder, const std::string& name,
                                            const std::function<void(uint64_t bytes)>& on_bytes) {
  const std::string path = absl::StrCat(folder, "/", name);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoError(errno, "open", path);
  const absl::Cleanup close_file = [fd] { close(fd); };
  const auto buffer = std::make_unique<char[]>(kPart);
  CheckpointFile file;
  file.name = name;
  while (true) {
    const ssize_t got = read(fd, buffer.get(), kPart);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoError(errno, "read", path);
    if (got == 0) return file;
    file.crc32c = ExtendCrc32c(file.crc32c, buffer.get(), static_cast<size_t>(got));
    file.bytes += static_cast<uint64_t>(got);
    if (on_bytes) on_bytes(static_cast<uint64_t>(got));
  }
}

absl::Status CopyAssets(FileSystem* file_system, const std::vector<std::string>& paths,
                        const std::string& folder, std::vector<CheckpointFile>* files) {
  if (paths.empty()) return absl::OkStatus();
  const std::string assets = absl::StrCat(folder, "/", kAssets);
  ZS_RETURN_IF_ERROR(file_system->MakeFolder(assets));
  std::set<std::string> names;
  for (const std::string& path : paths) {
    const std::string base = path.substr(path.rfind('/') + 1);
    const std::string name = absl::StrCat(kAssets, "/", base);
    if (!StaysInside(name) || !names.insert(name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "cannot carry ", path, " along in a checkpoint: ",
          StaysInside(name) ? "there are two files of this name" : "its name cannot be used"));
    }
    ZS_ASSIGN_OR_RETURN(const std::string content, ReadFile(path, kMaxAsset));
    ZS_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> copy,
                        file_system->Create(absl::StrCat(folder, "/", name)));
    ZS_RETURN_IF_ERROR(copy->Append(content.data(), content.size()));
    ZS_RETURN_IF_ERROR(copy->SyncAndClose());
    files->push_back({name, content.size(), Crc32c(content.data(), content.size())});
  }
  return file_system->SyncFolder(assets);
}

}  // namespace zeroshard
