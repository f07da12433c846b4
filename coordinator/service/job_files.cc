#include "coordinator/service/job_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/files.h"
#include "common/spec/history_line.h"
#include "nlohmann/json.hpp"

namespace zeroshard::coordinator {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

// All of `text` at the end of the file, or nothing of it.
absl::Status AppendWhole(const std::string& path, const std::string& text, bool sync) {
  const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (file.get() < 0) return ErrnoError(errno, "open", path);
  struct stat before;
  if (fstat(file.get(), &before) != 0) return ErrnoError(errno, "look at", path);
  size_t done = 0;
  int error = 0;
  while (done < text.size() && error == 0) {
    const ssize_t wrote = write(file.get(), text.data() + done, text.size() - done);
    if (wrote >= 0) {
      done += static_cast<size_t>(wrote);
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error == 0 && sync && fdatasync(file.get()) != 0) error = errno;
  if (error == 0) return absl::OkStatus();
  if (ftruncate(file.get(), before.st_size) != 0) {
    return absl::DataLossError(absl::StrCat("cannot write ", path, " and cannot undo half of it"));
  }
  return ErrnoError(error, "write", path);
}

// Up to `most` bytes from `offset` on.
absl::StatusOr<std::string> ReadPart(const std::string& path, uint64_t offset, size_t most) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) {
    if (errno == ENOENT) return std::string();
    return ErrnoError(errno, "open", path);
  }
  std::string text(most, '\0');
  size_t done = 0;
  while (done < most) {
    const ssize_t got =
        pread(file.get(), text.data() + done, most - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoError(errno, "read", path);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  text.resize(done);
  return text;
}

}  // namespace

absl::StatusOr<v1::StepRecord> ParseHistoryLine(const std::string& line) {
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  v1::StepRecord record;
  const auto number = [&](const char* key, double* to) {
    const auto found = json.find(key);
    if (found == json.end() || !found->is_number()) return false;
    *to = found->get<double>();
    return true;
  };
  const auto count = [&](const char* key, uint64_t* to) {
    const auto found = json.find(key);
    if (found == json.end() || !found->is_number_unsigned()) return false;
    *to = found->get<uint64_t>();
    return true;
  };
  uint64_t step = 0;
  uint64_t tokens = 0;
  double loss = 0;
  double grad_norm = 0;
  double learning_rate = 0;
  double seconds = 0;
  if (!json.is_object() || !count("step", &step) || !number("loss", &loss) ||
      !number("grad_norm", &grad_norm) || !number("learning_rate", &learning_rate) ||
      !count("tokens", &tokens) || !number("seconds", &seconds)) {
    return absl::InvalidArgumentError(absl::StrCat("no step record: ", line.substr(0, 100)));
  }
  record.set_step(step);
  record.set_loss(loss);
  record.set_grad_norm(grad_norm);
  record.set_learning_rate(learning_rate);
  record.set_tokens(tokens);
  record.set_seconds(seconds);
  return record;
}

absl::Status JobFiles::Prepare(const std::string& job, const std::string& run_id) {
  const std::string folder = Path(absl::StrCat("jobs/", job));
  const std::string marker = absl::StrCat(folder, "/run");
  std::error_code error;
  if (std::filesystem::exists(folder, error)) {
    const absl::StatusOr<std::string> owner = ReadFile(marker, 1024);
    std::string old = owner.ok() ? std::string(absl::StripSuffix(*owner, "\n")) : "";
    if (old == run_id) return absl::OkStatus();
    if (old.empty() || old.find('/') != std::string::npos) old = "unknown";
    std::string target = absl::StrCat(folder, "@", old);
    for (int i = 2; std::filesystem::exists(target, error); ++i) {
      target = absl::StrCat(folder, "@", old, ".", i);
    }
    if (rename(folder.c_str(), target.c_str()) != 0) return ErrnoError(errno, "rename", folder);
  }
  if (absl::Status made = MakeFolders(absl::StrCat(folder, "/logs")); !made.ok()) return made;
  return WriteFileAtomically(marker, absl::StrCat(run_id, "\n"));
}

absl::StatusOr<JobFiles::Ends> JobFiles::Recover(const std::string& directory, bool repair) {
  const std::string path = absl::StrCat(Path(directory), "/history.jsonl");
  Ends ends;
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path, error);
  if (error) return ends;  // no step was committed yet
  uint64_t good = 0;
  while (true) {
    absl::StatusOr<std::string> part = ReadPart(path, good, 1 << 20);
    if (!part.ok()) return part.status();
    size_t begin = 0;
    bool bad = false;
    for (size_t end; (end = part->find('\n', begin)) != std::string::npos; begin = end + 1) {
      const absl::StatusOr<v1::StepRecord> record =
          ParseHistoryLine(part->substr(begin, end - begin));
      if (!record.ok() || record->step() != ends.last.step() + 1) {
        bad = true;
        break;
      }
      if (ends.first.step() == 0) ends.first = *record;
      ends.last = *record;
    }
    good += begin;
    if (bad || begin == 0) break;
  }
  if (good == size || !repair) return ends;
  const absl::StatusOr<std::string> rest = ReadPart(path, good, 1 << 16);
  if (!rest.ok()) return rest.status();
  if (rest->find('\n') != std::string::npos) {
    const std::string kept = path + ".damaged";
    std::filesystem::copy_file(path, kept, std::filesystem::copy_options::overwrite_existing,
                               error);
    if (error) return ErrnoError(error.value(), "copy", path);
    ends.warning = absl::StrCat(path, " is damaged after step ", ends.last.step(), "; ",
                                size - good, " bytes were cut, the whole file is kept as ", kept);
  } else {
    ends.warning = absl::StrCat(path, ": a torn last line of ", size - good, " bytes was cut");
  }
  if (truncate(path.c_str(), static_cast<off_t>(good)) != 0) {
    return ErrnoError(errno, "shorten", path);
  }
  return ends;
}

absl::Status JobFiles::AppendHistory(const std::string& job, const std::string& run_id,
                                     const std::vector<v1::StepRecord>& records) {
  std::string text;
  for (const v1::StepRecord& record : records)
    absl::StrAppend(&text, FormatHistoryLine(record), "\n");
  return AppendWhole(Path(absl::StrCat("jobs/", job, "/history.jsonl")), text, /*sync=*/true);
}

absl::Status JobFiles::AppendLog(const std::string& job, const std::string& run_id, uint32_t rank,
                                 const std::vector<std::string>& lines) {
  const std::string path = Path(absl::StrCat("jobs/", job, "/logs/rank-", rank, ".log"));
  std::error_code error;
  uint64_t size = std::filesystem::file_size(path, error);
  if (error) size = 0;
  if (size >= kMaxLogBytes) return absl::OkStatus();
  std::string text;
  for (const std::string& line : lines) {
    for (const char c : line) text += c == '\n' ? ' ' : c;
    text += '\n';
  }
  if (size + text.size() >= kMaxLogBytes) {
    absl::StrAppend(&text, "(this log has ", kMaxLogBytes,
                    " bytes, the most that are kept; later lines are dropped)\n");
  }
  return AppendWhole(path, text, /*sync=*/false);
}

absl::StatusOr<std::vector<v1::StepRecord>> HistoryReader::Next(size_t most) {
  std::vector<v1::StepRecord> records;
  absl::StatusOr<std::string> part = ReadPart(path_, offset_, 256 << 10);
  if (!part.ok()) return part.status();
  size_t begin = 0;
  for (size_t end; records.size() < most && (end = part->find('\n', begin)) != std::string::npos;
       begin = end + 1) {
    absl::StatusOr<v1::StepRecord> record = ParseHistoryLine(part->substr(begin, end - begin));
    if (!record.ok()) {
      return absl::DataLossError(
          absl::StrCat(path_, " at byte ", offset_ + begin, ": ", record.status().message()));
    }
    records.push_back(*std::move(record));
  }
  offset_ += begin;
  return records;
}

absl::StatusOr<std::string> LogReader::Next(size_t most_bytes) {
  absl::StatusOr<std::string> part = ReadPart(path_, offset_, most_bytes);
  if (!part.ok()) return part.status();
  const size_t end = part->rfind('\n');
  if (end != std::string::npos) part->resize(end + 1);
  offset_ += part->size();
  return part;
}

}  // namespace zeroshard::coordinator
