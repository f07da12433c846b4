// A job's steps in a bounded number of points, however many there were.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/service/line_files.h"
#include "nlohmann/json.hpp"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard::coordinator {

// `width` steps that follow each other, fewer at the end.
struct CurvePoint {
  uint64_t first = 0, last = 0;  // steps
  uint64_t steps = 0;
  uint64_t finite = 0;  // steps whose loss is
  double loss_sum = 0;  // of those
  double least = 0, most = 0;
  uint64_t skipped = 0;
  double grad_norm = 0, learning_rate = 0;  // of the last step
  uint64_t tokens = 0;
  double seconds = 0;
  uint64_t eval_step = 0;  // the last at which it was measured; 0: none
  double eval_loss = 0;
  uint64_t lost = 0;  // committed steps that were given up before steps of this point
};

// Pure. When it is full, neighbours become one: between kMostPoints / 2 and kMostPoints points,
// each of the same power of two of steps.
class Curve {
 public:
  static constexpr size_t kMostPoints = 600;

  // In order.
  void Add(const v1::StepRecord& record);
  const std::vector<CurvePoint>& points() const { return points_; }
  uint64_t width() const { return width_; }

  // Columns of equal length, without what is not finite (null):
  //   {"width":1,"step":[..],"loss":[..],"least":[..],"most":[..],"grad_norm":[..],
  //    "learning_rate":[..],"tokens":[..],"seconds":[..]}
  // `step` is a point's last, `loss` its mean, `tokens` and `seconds` its sums; and lists of pairs
  //   "eval":[[step,loss]..],"lost":[[step,steps given up before it]..],
  //   "skipped":[[step,steps skipped]..]
  nlohmann::ordered_json ToJson() const;

 private:
  void Halve();

  std::vector<CurvePoint> points_;
  uint64_t width_ = 1;
};

// The curve of a history file that grows. Thread-safe.
class CurveFile {
 public:
  explicit CurveFile(const std::string& path)
      : path_(path), lines_(std::make_unique<LineReader>(path, HistoryReader::kChunk)) {}

  // Reads what is new, for about `most` time. A history that was cut is read anew, as steps that
  // were done again need not be the same. DATA_LOSS: a line that is no record.
  absl::Status Update(absl::Duration most);
  // With "complete": everything that there was at the last Update is in it.
  nlohmann::ordered_json ToJson() const;
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  mutable std::mutex mutex_;
  std::unique_ptr<LineReader> lines_;
  size_t replaced_ = 0;
  Curve curve_;
  bool complete_ = false;
};

}  // namespace zeroshard::coordinator
