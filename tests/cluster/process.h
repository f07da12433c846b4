// A program run by a test: its output in files, its end awaited with a deadline.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace zeroshard::cluster {

// Kills and reaps the program when it goes out of scope. Not thread-safe.
class Process {
 public:
  // argv[0] is a path; output goes to PREFIX.out and PREFIX.err. The program dies with the test.
  Process(const std::vector<std::string>& argv, const std::string& prefix);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void Signal(int signal);
  // The exit code, or 128 + the signal; -1 and a failure of the test if it is still there after the
  // deadline.
  int Wait(absl::Duration deadline);
  bool Ended();

  std::string Out() const;
  std::string Err() const;
  pid_t pid() const { return pid_; }

 private:
  const std::string prefix_;
  pid_t pid_ = -1;
  bool ended_ = false;
  int code_ = -1;
};

// Looks until it holds or the deadline has passed.
bool Eventually(absl::Duration deadline, const std::function<bool()>& condition);

// False for a zombie too.
bool IsAlive(pid_t pid);

std::string ReadText(const std::string& path);

}  // namespace zeroshard::cluster
