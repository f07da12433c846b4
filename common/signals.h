// How a daemon is told to end: SIGTERM, SIGINT or SIGHUP, or from within.
#pragma once

#include "absl/time/time.h"

namespace zeroshard {

// Make one first thing in main, before any thread: it blocks SIGTERM, SIGINT and SIGHUP in this
// thread and in those started later, and ignores SIGPIPE. (A child process inherits the blocked
// mask: whoever forks calls RestoreSignalMask between fork and exec.) Trigger may be called from
// any thread.
class ShutdownSignal {
 public:
  ShutdownSignal();
  ~ShutdownSignal();
  ShutdownSignal(const ShutdownSignal&) = delete;
  ShutdownSignal& operator=(const ShutdownSignal&) = delete;

  // The signal that came (SIGTERM, SIGINT, SIGHUP), -1 after Trigger, 0 when `timeout` has passed.
  // Each signal is returned once.
  int Wait(absl::Duration timeout = absl::InfiniteDuration());

  // Makes Wait return -1, now and for ever.
  void Trigger();

 private:
  int signal_fd_ = -1;
  int event_fd_ = -1;
};

// Unblocks every signal and gives SIGPIPE its default action back. Async-signal-safe.
void RestoreSignalMask();

}  // namespace zeroshard
