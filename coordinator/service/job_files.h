// A job's files under the coordinator's data folder:
//   jobs/<name>/run              the run id that the folder belongs to, one line
//   jobs/<name>/history.jsonl    one line a committed step (common/spec/history_line.h)
//   jobs/<name>/samples.jsonl    one line a sample (line_files.h)
//   jobs/<name>/logs/rank-<r>.log
// When a name is submitted again the old folder becomes jobs/<name>@<its run id>.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/service/line_files.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard::coordinator {

// Not thread-safe: one writer. Readers use the classes of line_files.h on the same files.
class JobFiles {
 public:
  explicit JobFiles(std::string data_dir) : data_dir_(std::move(data_dir)) {}

  // Makes the folder the run's; may be repeated. Where `history_of` names an older run of this job
  // whose folder is there, the new history and samples begin with that run's steps before
  // `first_step`.
  absl::Status Prepare(const std::string& job, const std::string& run_id,
                       const std::string& history_of = "", uint64_t first_step = 1);

  struct Ends {
    v1::StepRecord first;  // of the run's own steps, from `own_from` on; step 0: none
    v1::StepRecord last;   // from `first_step` on
    std::map<std::string, uint64_t> sampled;  // of a live run: by prompt, the last step sampled
    std::string warning;                      // what was cut, empty when nothing
  };
  // Reads a run's history back. Of a live run (`repair`) everything from the first line on that is
  // not the next step is cut, and everything from a line of samples on that is none; if that is
  // more than one torn line, the file is kept beside it as history.jsonl.damaged.
  // The run goes on at `first_step`, which moves when it goes back; it began at `own_from`, or
  // later where no older run's steps come before.
  absl::StatusOr<Ends> Recover(const std::string& directory, bool repair, uint64_t first_step = 1,
                               uint64_t own_from = UINT64_MAX);

  // Cuts the history and samples of this run from `first_step` on, which are of steps that will be
  // done again. Each file is the old one or the new one at any time, on disk when this returns OK;
  // may be repeated. A file that is not there, or has nothing to cut, stays as it is.
  absl::Status Truncate(const std::string& job, const std::string& run_id, uint64_t first_step);

  // One write; on disk when it returns OK. After an error the file is as it was before.
  absl::Status AppendHistory(const std::string& job, const std::string& run_id,
                             const std::vector<v1::StepRecord>& records);

  // After an error the file is as it was before.
  absl::Status AppendSamples(const std::string& job, const std::string& run_id,
                             const std::vector<v1::SampleRecord>& samples);

  // Stops with a notice in the file when it has kMaxLogBytes.
  absl::Status AppendLog(const std::string& job, const std::string& run_id, uint32_t rank,
                         const std::vector<std::string>& lines);

  // Of the newest run of a name, or of an older one. `directory` comes from JobStatus.directory.
  std::string Path(const std::string& directory) const { return data_dir_ + "/" + directory; }

  static constexpr size_t kMaxLogBytes = 64 << 20;  // of one rank and run

 private:
  std::string data_dir_;
};

}  // namespace zeroshard::coordinator
