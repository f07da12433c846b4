#include "common/checkpoint/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <set>
#include <utility>

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

}  // namespace

absl::StatusOr<CheckpointFile> DescribeFile(const std::string& folder, const std::string& name,
                                            const std::function<void(uint64_t bytes)>& on_bytes,
                                            const std::atomic<bool>* stop) {
  const std::string path = absl::StrCat(folder, "/", name);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoError(errno, "open", path);
  const absl::Cleanup close_file = [fd] { close(fd); };
  const auto buffer = std::make_unique<char[]>(kPart);
  CheckpointFile file;
  file.name = name;
  while (true) {
    if (stop != nullptr && *stop)
      return absl::CancelledError(absl::StrCat("stopped reading ", path));
    const ssize_t got = read(fd, buffer.get(), kPart);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoError(errno, "read", path);
    if (got == 0) return file;
    file.crc32c = ExtendCrc32c(file.crc32c, buffer.get(), static_cast<size_t>(got));
    file.bytes += static_cast<uint64_t>(got);
    if (on_bytes) on_bytes(static_cast<uint64_t>(got));
  }
}

absl::StatusOr<std::vector<Asset>> ReadAssets(const std::map<std::string, std::string>& paths,
                                              size_t limit) {
  std::vector<Asset> assets;
  size_t total = 0;
  for (const auto& [name, path] : paths) {
    absl::StatusOr<std::string> content = ReadFile(path, limit - total);
    if (absl::IsOutOfRange(content.status())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "with ", path, " the files that travel with the model have more than ", limit,
          " bytes; they are kept in memory and copied into each checkpoint: take away what is not "
          "the model's configuration or tokenizer"));
    }
    ZS_RETURN_IF_ERROR(content.status());
    total += content->size();
    assets.push_back({name, *std::move(content)});
  }
  return assets;
}

absl::Status WriteAssets(FileSystem* file_system, const std::vector<Asset>& assets,
                         const std::string& folder, std::vector<CheckpointFile>* files) {
  if (assets.empty()) return absl::OkStatus();
  const std::string assets_folder = absl::StrCat(folder, "/", kAssets);
  ZS_RETURN_IF_ERROR(file_system->MakeFolder(assets_folder));
  std::set<std::string> names;
  for (const Asset& asset : assets) {
    const std::string name = absl::StrCat(kAssets, "/", asset.name);
    if (!StaysInside(name) || !names.insert(name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "cannot carry ", asset.name, " along in a checkpoint: ",
          StaysInside(name) ? "there are two files of this name" : "its name cannot be used"));
    }
    ZS_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file,
                        file_system->Create(absl::StrCat(folder, "/", name)));
    ZS_RETURN_IF_ERROR(file->Append(asset.content.data(), asset.content.size()));
    ZS_RETURN_IF_ERROR(file->SyncAndClose());
    files->push_back(
        {name, asset.content.size(), Crc32c(asset.content.data(), asset.content.size())});
  }
  return file_system->SyncFolder(assets_folder);
}

}  // namespace zeroshard
