#include "coordinator/service/job_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/checkpoint/file_system.h"
#include "common/descriptor.h"
#include "common/files.h"
#include "common/log.h"
#include "common/spec/history_line.h"

namespace zeroshard::coordinator {
namespace {

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
  if (done > 0 && ftruncate(file.get(), before.st_size) != 0) {
    return absl::DataLossError(absl::StrCat("cannot write ", path, " and cannot undo half of it"));
  }
  return ErrnoError(error, "write", path);
}

// Begins the file `name` of `to` with the records of that of `from` whose step is before
// `first_step`. A damaged line ends them.
template <typename Reader, typename Format>
absl::Status Carry(const std::string& from, const std::string& to, const char* name,
                   uint64_t first_step, Format format) {
  Reader reader(from + name);
  while (true) {
    const auto records = reader.Next(10000);
    if (!records.ok()) {
      LogWarning("what follows is not carried over: ", records.status().message());
      return absl::OkStatus();
    }
    std::string text;
    for (const auto& record : *records) {
      if (record.step() < first_step) absl::StrAppend(&text, format(record), "\n");
    }
    if (text.empty()) return absl::OkStatus();
    if (absl::Status added = AppendWhole(to + name, text, /*sync=*/true); !added.ok()) {
      return added;
    }
  }
}

// Takes every record of `first_step` or later out of a file.
template <typename Reader, typename Format>
absl::Status Cut(const std::string& folder, const char* name, uint64_t first_step, Format format) {
  const std::string path = folder + name;
  const std::string part = path + ".part";
  unlink(part.c_str());  // of a cut that a crash cut short
  Reader reader(path);
  bool any = false;
  while (true) {
    const auto records = reader.Next(10000);
    if (!records.ok()) return records.status();
    if (records->empty()) break;
    std::string kept;
    for (const auto& record : *records) {
      if (record.step() < first_step) {
        absl::StrAppend(&kept, format(record), "\n");
      } else {
        any = true;
      }
    }
    if (absl::Status added = AppendWhole(part, kept, /*sync=*/true); !added.ok()) return added;
  }
  if (!any) {
    unlink(part.c_str());
    return absl::OkStatus();
  }
  if (rename(part.c_str(), path.c_str()) != 0) return ErrnoError(errno, "rename", part);
  // Before anything is appended to the new file.
  return FileSystem::Real().SyncFolder(folder);
}

// Hands the file's lines to `accept` until it refuses one. With `repair` what is left is cut; if
// that is more than one torn line, the file is kept beside it. Returns what was cut, in words.
absl::StatusOr<std::string> RecoverLines(const std::string& path, size_t chunk, bool repair,
                                         const std::function<bool(const std::string&)>& accept) {
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path, error);
  if (error) return "";  // nothing was written yet
  uint64_t good = 0;
  size_t lines = 0;
  LineReader reader(path, chunk);
  for (bool bad = false; !bad;) {
    absl::StatusOr<std::vector<LineReader::Line>> read = reader.Next(10000);
    if (!read.ok()) return read.status();
    if (read->empty()) break;
    for (const LineReader::Line& line : *read) {
      bad = !accept(line.text);
      if (bad) break;
      good = line.offset + line.text.size() + 1;
      ++lines;
    }
  }
  if (good == size || !repair) return "";
  const absl::StatusOr<std::string> rest = ReadPart(path, good, chunk);
  if (!rest.ok()) return rest.status();
  std::string warning;
  if (rest->find('\n') != std::string::npos) {
    const std::string kept = path + ".damaged";
    std::filesystem::copy_file(path, kept, std::filesystem::copy_options::overwrite_existing,
                               error);
    if (error) return ErrnoError(error.value(), "copy", path);
    warning = absl::StrCat(path, " is damaged after line ", lines, "; ", size - good,
                           " bytes were cut, the whole file is kept as ", kept);
  } else {
    warning = absl::StrCat(path, ": a torn last line of ", size - good, " bytes was cut");
  }
  if (truncate(path.c_str(), static_cast<off_t>(good)) != 0) {
    return ErrnoError(errno, "shorten", path);
  }
  return warning;
}

}  // namespace

absl::Status JobFiles::Prepare(const std::string& job, const std::string& run_id,
                               const std::string& history_of, uint64_t first_step) {
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
  if (!history_of.empty() && history_of.find('/') == std::string::npos) {
    const std::string older = absl::StrCat(folder, "@", history_of);
    for (const absl::Status& carried :
         {Carry<HistoryReader>(older, folder, "/history.jsonl", first_step, FormatHistoryLine),
          Carry<SampleReader>(older, folder, "/samples.jsonl", first_step, FormatSampleLine)}) {
      if (!carried.ok()) return carried;
    }
  }
  return WriteFileAtomically(marker, absl::StrCat(run_id, "\n"));
}

absl::StatusOr<JobFiles::Ends> JobFiles::Recover(const std::string& directory, bool repair,
                                                 uint64_t first_step, uint64_t own_from) {
  own_from = std::min(own_from, first_step);
  Ends ends;
  uint64_t last = 0;  // the step on the line before, of this run or of the one it goes on from
  absl::StatusOr<std::string> warning =
      RecoverLines(absl::StrCat(Path(directory), "/history.jsonl"), HistoryReader::kChunk, repair,
                   [&](const std::string& line) {
                     const absl::StatusOr<v1::StepRecord> record = ParseHistoryLine(line);
                     if (!record.ok() || record->step() == 0 || record->step() <= last)
                       return false;
                     // The older run may have been killed before it reported all that its
                     // checkpoint holds.
                     if (record->step() > first_step && record->step() != last + 1) return false;
                     last = record->step();
                     if (last >= own_from && ends.first.step() == 0) ends.first = *record;
                     if (last >= first_step) ends.last = *record;
                     return true;
                   });
  if (!warning.ok()) return warning.status();
  ends.warning = *std::move(warning);
  if (!repair) return ends;
  warning = RecoverLines(absl::StrCat(Path(directory), "/samples.jsonl"), SampleReader::kChunk,
                         repair, [&](const std::string& line) {
                           const absl::StatusOr<v1::SampleRecord> record = ParseSampleLine(line);
                           if (!record.ok()) return false;
                           uint64_t& step = ends.sampled[record->prompt()];
                           step = std::max(step, record->step());
                           return true;
                         });
  if (!warning.ok()) return warning.status();
  if (!warning->empty()) {
    absl::StrAppend(&ends.warning, ends.warning.empty() ? "" : "; ", *warning);
  }
  return ends;
}

absl::Status JobFiles::Truncate(const std::string& job, const std::string& run_id,
                                uint64_t first_step) {
  const std::string folder = Path(absl::StrCat("jobs/", job));
  const absl::StatusOr<std::string> owner = ReadFile(folder + "/run", 1024);
  if (!owner.ok() || absl::StripSuffix(*owner, "\n") != run_id) {
    return absl::FailedPreconditionError(
        absl::StrCat(folder, " is not the folder of ", run_id, "; its history cannot be cut"));
  }
  for (const absl::Status& cut :
       {Cut<HistoryReader>(folder, "/history.jsonl", first_step, FormatHistoryLine),
        Cut<SampleReader>(folder, "/samples.jsonl", first_step, FormatSampleLine)}) {
    if (!cut.ok()) return cut;
  }
  return absl::OkStatus();
}

absl::Status JobFiles::AppendHistory(const std::string& job, const std::string& run_id,
                                     const std::vector<v1::StepRecord>& records) {
  std::string text;
  for (const v1::StepRecord& record : records)
    absl::StrAppend(&text, FormatHistoryLine(record), "\n");
  return AppendWhole(Path(absl::StrCat("jobs/", job, "/history.jsonl")), text, /*sync=*/true);
}

absl::Status JobFiles::AppendSamples(const std::string& job, const std::string& run_id,
                                     const std::vector<v1::SampleRecord>& samples) {
  std::string text;
  for (const v1::SampleRecord& sample : samples) {
    absl::StrAppend(&text, FormatSampleLine(sample), "\n");
  }
  return AppendWhole(Path(absl::StrCat("jobs/", job, "/samples.jsonl")), text, /*sync=*/false);
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

}  // namespace zeroshard::coordinator
