// Which elements of a run have arrived: ranges that tile it exactly once. A range may be said
// again; one that overlaps another without being equal to it never fits. Pure arithmetic, not
// thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

#include "absl/status/status.h"

namespace zeroshard::store {

class Coverage {
 public:
  // Ranges that a run of `size` elements may be made of: 64 elements each on average, and never
  // fewer than 1024 ranges. What they take is a small part of what the run itself does.
  static constexpr uint64_t MostRanges(uint64_t size) {
    return std::max<uint64_t>(1024, size / 64);
  }

  explicit Coverage(uint64_t size = 0) : size_(size) {}

  // INVALID_ARGUMENT: empty, not within the run, overlapping another range than itself, or one too
  // many. The message begins with the range ("elements 64 to 127 ...").
  absl::Status Check(uint64_t begin, uint64_t count) const;
  // Check's errors; nothing changes then.
  absl::Status Add(uint64_t begin, uint64_t count);
  void Clear();

  uint64_t size() const { return size_; }
  uint64_t covered() const { return covered_; }
  bool complete() const { return covered_ == size_; }
  // The first element that is missing; size() where none is.
  uint64_t FirstGap() const;

 private:
  uint64_t size_;
  uint64_t covered_ = 0;
  std::map<uint64_t, uint64_t> ends_;  // by begin
};

}  // namespace zeroshard::store
