// Lines on their way to a job's log at the coordinator. Bounded: when the coordinator is away for
// long, the oldest stay and later ones are counted instead of kept.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard {

// Thread-safe.
class LogQueue {
 public:
  explicit LogQueue(size_t most_bytes = 256 << 10) : most_bytes_(most_bytes) {}

  // Whose lines the following ones are; null: nobody's, and they are not kept.
  void SetRun(std::shared_ptr<const v1::Fence> run);
  void Add(const std::string& line);
  // The next lines of one run, at most 64 KiB; nothing when there are none. Where lines were
  // dropped, a line says how many.
  std::optional<v1::LogLines> Take();

 private:
  struct Line {
    std::shared_ptr<const v1::Fence> run;
    std::string text;
  };
  const size_t most_bytes_;
  std::mutex mutex_;
  std::shared_ptr<const v1::Fence> run_;
  std::deque<Line> lines_;
  size_t bytes_ = 0;
  uint64_t dropped_ = 0;
  std::shared_ptr<const v1::Fence> dropped_of_;
};

}  // namespace zeroshard
