// Files of one record a line, read from their beginning while they grow: a job's history, samples
// and logs. Their formats:
//   history.jsonl  common/spec/history_line.h
//   samples.jsonl  {"step":100,"prompt":"Once","text":" upon a time"}
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard::coordinator {

// One line of a file, without its newline. INVALID_ARGUMENT: it is none.
absl::StatusOr<v1::StepRecord> ParseHistoryLine(const std::string& line);
std::string FormatSampleLine(const v1::SampleRecord& record);
absl::StatusOr<v1::SampleRecord> ParseSampleLine(const std::string& line);

// Up to `most` bytes from `offset` on; nothing where there is no such file.
absl::StatusOr<std::string> ReadPart(const std::string& path, uint64_t offset, size_t most);

// A missing file reads as empty. A last line without its newline is not there yet.
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
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  const size_t chunk_;
  uint64_t offset_ = 0;
};

// The same as records. DATA_LOSS: a line that is none.
class HistoryReader {
 public:
  explicit HistoryReader(std::string path) : lines_(std::move(path), kChunk) {}
  absl::StatusOr<std::vector<v1::StepRecord>> Next(size_t most);
  static constexpr size_t kChunk = 256 << 10;

 private:
  LineReader lines_;
};

class SampleReader {
 public:
  explicit SampleReader(std::string path) : lines_(std::move(path), kChunk) {}
  absl::StatusOr<std::vector<v1::SampleRecord>> Next(size_t most);
  static constexpr size_t kChunk = 1 << 20;

 private:
  LineReader lines_;
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
