// Simulated time and chance: everything that happens is an entry of one queue, in an order that a
// seed decides. Keeps the last events for whoever has to understand a violation. Not thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <queue>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace zeroshard::simulator {

// SplitMix64's finaliser (Steele, Lea, Flood 2014).
uint64_t Mix(uint64_t x);
inline uint64_t Mix(uint64_t a, uint64_t b) { return Mix(Mix(a) ^ b); }
uint64_t HashOf(const std::string& text);

class World {
 public:
  explicit World(uint64_t seed) : state_(Mix(seed)) {}

  // --- time ---
  absl::Duration now() const { return now_; }
  int64_t unix_ms() const { return 1767225600000 + absl::ToInt64Milliseconds(now_); }
  void After(absl::Duration delay, std::function<void()> what);
  // Runs the next entry. False: there is none.
  bool Step();
  uint64_t steps() const { return steps_; }

  // --- chance ---
  uint64_t Random() { return Mix(state_ += 0x9e3779b97f4a7c15u); }
  uint64_t Upto(uint64_t most) { return Random() % (most + 1); }
  bool Chance(double percent) {
    return static_cast<double>(Random() % 1000000) < percent * 10000.0;
  }
  // Mostly near `from`, sometimes up to `to`.
  absl::Duration Between(absl::Duration from, absl::Duration to);
  absl::Duration Latency();

  // --- what is seen ---
  void Trace(std::string line);
  std::string TraceText() const;
  // Once: what came first is the cause.
  void Violate(const std::string& invariant, const std::string& what);
  bool violated() const { return !violation_.empty(); }
  const std::string& violation() const { return violation_; }
  bool verbose = false;  // traces go to stderr too

 private:
  struct Entry {
    absl::Duration when;
    uint64_t order;
    std::function<void()> what;
    bool operator<(const Entry& other) const {
      return when != other.when ? when > other.when : order > other.order;
    }
  };
  uint64_t state_;
  absl::Duration now_ = absl::Seconds(100);
  uint64_t order_ = 0;
  uint64_t steps_ = 0;
  std::priority_queue<Entry> queue_;
  std::deque<std::string> trace_;
  std::string violation_;
};

}  // namespace zeroshard::simulator
