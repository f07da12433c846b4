#include "worker/data/input_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "worker/data/file_bytes.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

// Appends the regular files below `folder` to `found`, in no order. Folders behind symbolic links
// are not entered, so the walk ends.
absl::Status Walk(const std::string& folder, const std::string& suffix,
                  std::vector<std::string>* found) {
  std::error_code error;
  std::vector<fs::path> folders = {folder};
  while (!folders.empty()) {
    const fs::path current = std::move(folders.back());
    folders.pop_back();
    fs::directory_iterator entry(current, error);
    for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      if (absl::StartsWith(name, ".")) continue;
      std::error_code ignored;  // gone or unreachable since it was listed: as if it were not there
      if (fs::is_directory(entry->symlink_status(ignored))) {
        folders.push_back(entry->path());
      } else if (fs::is_regular_file(entry->status(ignored)) && absl::EndsWith(name, suffix)) {
        found->push_back(entry->path().string());
      }
    }
    if (error) return FileError(error.value(), "list the folder", current.string());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<InputFile>> ListInputFiles(const std::vector<std::string>& paths,
                                                      const std::string& suffix,
                                                      const std::string& key) {
  std::vector<InputFile> files;
  std::set<std::pair<dev_t, ino_t>> seen;
  for (const std::string& path : paths) {
    struct stat info;
    if (stat(path.c_str(), &info) != 0) {
      const int code = errno;
      std::error_code ignored;
      const bool relative = !fs::path(path).is_absolute();
      return FileError(code, absl::StrCat("find ", key, " entry"),
                       relative ? absl::StrCat(path, " (in the worker's working folder ",
                                               fs::current_path(ignored).string(), ")")
                                : path);
    }
    std::vector<std::string> found;
    if (S_ISDIR(info.st_mode)) {
      if (absl::Status status = Walk(path, suffix, &found); !status.ok()) return status;
      std::sort(found.begin(), found.end());
      if (found.empty()) {
        return absl::InvalidArgumentError(absl::StrCat("the ", key, " folder ", path, " holds no ",
                                                       suffix.empty() ? "" : suffix + " ",
                                                       "files to train on"));
      }
    } else if (S_ISREG(info.st_mode)) {
      found.push_back(path);
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat(key, " entry ", path, " is neither a file nor a folder"));
    }
    for (std::string& file : found) {
      struct stat identity;
      if (stat(file.c_str(), &identity) != 0) return FileError(errno, "look at", file);
      if (!seen.emplace(identity.st_dev, identity.st_ino).second) continue;
      files.push_back({std::move(file), !S_ISDIR(info.st_mode)});
    }
  }
  return files;
}

}  // namespace zeroshard
