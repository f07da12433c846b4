#include "common/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace zeroshard {

absl::Status ErrnoError(int error, absl::string_view doing, const std::string& path) {
  return absl::ErrnoToStatus(error, absl::StrCat("cannot ", doing, " ", path));
}

absl::Status MakeFolders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return ErrnoError(error.value(), "create the folder", path);
  if (!std::filesystem::is_directory(path, error)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is there but is no folder; move it away or choose another path"));
  }
  return absl::OkStatus();
}

absl::Status WriteFileAtomically(const std::string& path, absl::string_view content) {
  const std::string part = absl::StrCat(path, ".", getpid(), ".part");
  const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoError(errno, "open", part);
  const auto give_up = [&](absl::string_view doing) {
    absl::Status status = ErrnoError(errno, doing, part);
    close(fd);
    unlink(part.c_str());
    return status;
  };
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t wrote = write(fd, content.data() + done, content.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return give_up("write");
    done += static_cast<size_t>(wrote);
  }
  if (fsync(fd) != 0) return give_up("sync");
  if (rename(part.c_str(), path.c_str()) != 0) return give_up("rename");
  close(fd);
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path, size_t limit) {
  // A pipe that nobody writes to would be waited for, here and at the first read.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ErrnoError(errno, "open", path);
  struct stat info;
  if (fstat(fd, &info) == 0 && !S_ISREG(info.st_mode)) {
    close(fd);
    return absl::InvalidArgumentError(absl::StrCat(path, " is no regular file"));
  }
  std::string content;
  char buffer[1 << 14];
  while (true) {
    const ssize_t got = read(fd, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      absl::Status status = ErrnoError(errno, "read", path);
      close(fd);
      return status;
    }
    if (got == 0) break;
    content.append(buffer, static_cast<size_t>(got));
    if (content.size() > limit) {
      close(fd);
      return absl::OutOfRangeError(
          absl::StrCat(path, " is larger than ", limit, " bytes, the most that is read here"));
    }
  }
  close(fd);
  return content;
}

absl::Status WritePortFile(const std::string& path, const PortFile& ports) {
  const nlohmann::json content = {
      {"grpc", ports.grpc}, {"metrics", ports.metrics}, {"pid", ports.pid}};
  return WriteFileAtomically(path, absl::StrCat(content.dump(), "\n"));
}

absl::StatusOr<PortFile> ReadPortFile(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, 1 << 16);
  if (!text.ok()) return text.status();
  const nlohmann::json content = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  PortFile ports;
  const auto read_text = [&](const char* key, std::string& to) {
    const auto found = content.find(key);
    if (found == content.end() || !found->is_string()) return false;
    to = found->get<std::string>();
    return true;
  };
  if (!content.is_object() || !read_text("grpc", ports.grpc) ||
      !read_text("metrics", ports.metrics) || !content.contains("pid") ||
      !content["pid"].is_number_integer()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " is not what a daemon writes with --port-file (keys grpc, metrics, pid)"));
  }
  ports.pid = content["pid"].get<long>();
  return ports;
}

}  // namespace zeroshard
