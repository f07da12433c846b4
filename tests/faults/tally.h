// What was killed in the runs of one kind, printed and written to a file as it happens: ctest keeps
// what a passing test prints to itself.
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace zeroshard::cluster {

enum class Role { kWorker, kRankZero, kCoordinator, kStore };
inline constexpr int kRoles = 4;

// In the order in which a run gets there.
enum class Moment { kDaemonsStart, kJobStarts, kFirstStep, kLater };
inline constexpr int kMoments = 4;

struct Kill {
  std::string victim;  // "store-1"
  Role role;
  Moment moment;
  size_t steps;    // rows of the history then
  double seconds;  // since the run began
};

// "worker-0 (rank 0) in the first step, 1.2 s; store-1 after 12 steps, 3.4 s"
std::string Words(const std::vector<Kill>& kills);

// 0 where there is no such process.
pid_t ParentOf(pid_t pid);

// Not thread-safe. Fails the test if the file cannot be written.
class Tally {
 public:
  // Writes to KIND.txt in the build folder's tests/faults/summaries, anew.
  explicit Tally(const std::string& kind);

  void Add(uint64_t seed, const std::vector<Kill>& kills, double seconds, bool same);
  // Prints the summary.
  void End();

  uint64_t runs() const { return runs_; }
  // "9 runs, 25 kills (worker 6, ...; while daemons start 2, ...) in 141 s"
  std::string Summary() const;
  // Roles and moments at which nothing was killed yet.
  std::vector<std::string> Missing() const;

 private:
  void Print(const std::string& line);

  const std::string kind_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  std::ofstream file_;
  uint64_t runs_ = 0;
  std::array<uint64_t, kRoles> roles_{};
  std::array<uint64_t, kMoments> moments_{};
};

}  // namespace zeroshard::cluster
