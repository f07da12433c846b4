// How long the training thread waited. Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>

namespace zeroshard {

// Nanoseconds so far, by what was waited for.
struct WaitTimes {
  uint64_t communication = 0;  // other ranks
  uint64_t stores = 0;         // the shard stores
};

// Adds the time it lives to a counter.
class Waiting {
 public:
  explicit Waiting(uint64_t* total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  ~Waiting() {
    *total_ += static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                         std::chrono::steady_clock::now() - start_)
                                         .count());
  }

 private:
  uint64_t* total_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace zeroshard
