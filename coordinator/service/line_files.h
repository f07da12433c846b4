// Files of one record a line, read from their beginning while they grow: a job's history, samples
// and logs. Their formats:
//   history.jsonl  common/spec/history_line.h
//   samples.jsonl  {"step":100,"prompt":"Once","text":" upon a time"}
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard::coordinator {

// One line of a file, without its newline. INVALID_ARGUMENT: it is none.
absl::StatusOr<v1::StepRecord> ParseHistoryLine(const std::string& line);
std::string FormatSampleLine(const v1::SampleRecord& record);
absl::StatusOr<v1::SampleRecord> ParseSampleLine(const std::string& line);

// Tells a file from one that has taken its name, and its inode perhaps.
struct FileId {
  uint64_t device = 0, inode = 0;  // 0: there is none
  int64_t born_ns = 0;             // where the file system knows it
  bool operator==(const FileId&) const = default;
};

// Up to `most` bytes from `offset` on; nothing where there is no such file. `id`: of which file.
absl::StatusOr<std::string> ReadPart(const std::string& path, uint64_t offset, size_t most,
                                     FileId* id = nullptr);

// A missing file reads as empty. A last line without its newline is not there yet. Where another
// file has taken the name, it is read from its beginning.
class LineReader {
 public:
  // Lines are longer than `chunk` nowhere.
  LineReader(std::string path, size_t chunk) : path_(std::move(path)), chunk_(chunk) {}

  struct Line {
    std::string text;  // without the newline
    uint64_t offset = 0;
  };
  // At most `most` further lines; none at the end of what is there now.
  absl::StatusOr<std::vector<Line>> Next(size_t most);
  uint64_t offset() const { return offset_; }  // behind the last line returned
  // How often another file was found in the place of the one read so far.
  size_t replaced() const { return replaced_; }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  const size_t chunk_;
  uint64_t offset_ = 0;
  FileId id_;
  size_t replaced_ = 0;
};

// The same as records. DATA_LOSS: a line that is none. A history that was cut and goes on
// (JobFiles::Truncate) is read as one: what was returned before is not returned again, also where
// it was done again.
class HistoryReader {
 public:
  explicit HistoryReader(std::string path) : lines_(std::move(path), kChunk) {}
  absl::StatusOr<std::vector<v1::StepRecord>> Next(size_t most);
  static constexpr size_t kChunk = 256 << 10;

 private:
  LineReader lines_;
  uint64_t last_ = 0;  // step returned
};

class SampleReader {
 public:
  explicit SampleReader(std::string path) : lines_(std::move(path), kChunk) {}
  absl::StatusOr<std::vector<v1::SampleRecord>> Next(size_t most);
  static constexpr size_t kChunk = 1 << 20;

 private:
  LineReader lines_;
  uint64_t last_ = 0;              // step returned
  std::set<std::string> prompts_;  // returned of that step
};

// The same as text, in pieces that end with a whole line where there is one.
class LogReader {
 public:
  explicit LogReader(std::string path) : path_(std::move(path)) {}
  absl::StatusOr<std::string> Next(size_t most_bytes);

 private:
  const std::string path_;
  uint64_t offset_ = 0;
};

}  // namespace zeroshard::coordinator
