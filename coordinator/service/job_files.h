// A job's files under the coordinator's data folder:
//   jobs/<name>/run              the run id that the folder belongs to, one line
//   jobs/<name>/history.jsonl    one line a committed step (common/spec/history_line.h)
//   jobs/<name>/logs/rank-<r>.log
// When a name is submitted again the old folder becomes jobs/<name>@<its run id>.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard::coordinator {

// Not thread-safe: one writer. Readers use HistoryReader and LogReader on the same files.
class JobFiles {
 public:
  explicit JobFiles(std::string data_dir) : data_dir_(std::move(data_dir)) {}

  // Makes the folder the run's; may be repeated.
  absl::Status Prepare(const std::string& job, const std::string& run_id);

  struct Ends {
    v1::StepRecord first;  // step 0: none
    v1::StepRecord last;
    std::string warning;  // what was cut, empty when nothing
  };
  // Reads a run's history back. Of a live run (`repair`) everything from the first line on that is
  // not the next step is cut; if that is more than one torn line, the file is kept beside it as
  // history.jsonl.damaged.
  absl::StatusOr<Ends> Recover(const std::string& directory, bool repair);

  // One write; on disk when it returns OK. After an error the file is as it was before.
  absl::Status AppendHistory(const std::string& job, const std::string& run_id,
                             const std::vector<v1::StepRecord>& records);

  // Stops with a notice in the file when it has kMaxLogBytes.
  absl::Status AppendLog(const std::string& job, const std::string& run_id, uint32_t rank,
                         const std::vector<std::string>& lines);

  // Of the newest run of a name, or of an older one. `directory` comes from JobStatus.directory.
  std::string Path(const std::string& directory) const { return data_dir_ + "/" + directory; }

  static constexpr size_t kMaxLogBytes = 64 << 20;  // of one rank and run

 private:
  std::string data_dir_;
};

// Reads a history file from its beginning, also while it grows. A missing file reads as empty.
class HistoryReader {
 public:
  explicit HistoryReader(std::string path) : path_(std::move(path)) {}

  // At most `most` further complete lines; empty at the end of what is there now. DATA_LOSS: a line
  // that is no step.
  absl::StatusOr<std::vector<v1::StepRecord>> Next(size_t most);

 private:
  const std::string path_;
  uint64_t offset_ = 0;
};

// The same for text, in pieces that end with a whole line where there is one.
class LogReader {
 public:
  explicit LogReader(std::string path) : path_(std::move(path)) {}
  absl::StatusOr<std::string> Next(size_t most_bytes);

 private:
  const std::string path_;
  uint64_t offset_ = 0;
};

// One line of a history file. INVALID_ARGUMENT: it is none.
absl::StatusOr<v1::StepRecord> ParseHistoryLine(const std::string& line);

}  // namespace zeroshard::coordinator
