#include "common/signals.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "common/clock.h"

namespace zeroshard {

ShutdownSignal::ShutdownSignal() {
  signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  // A terminal that is closed, unless nohup had it ignored.
  struct sigaction hangup;
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) {
    sigaddset(&set, SIGHUP);
  }
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal_fd_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (signal_fd_ < 0 || event_fd_ < 0) {
    std::perror("signalfd/eventfd");  // out of descriptors before anything was opened
    std::exit(1);
  }
}

ShutdownSignal::~ShutdownSignal() {
  close(signal_fd_);
  close(event_fd_);
}

int ShutdownSignal::Wait(absl::Duration timeout) {
  const absl::Duration end = SystemClock::Get().Now() + timeout;
  while (true) {
    // An hour at a time keeps "for ever" within poll's int of milliseconds.
    const absl::Duration left = std::min(end - SystemClock::Get().Now(), absl::Hours(1));
    pollfd fds[2] = {{signal_fd_, POLLIN, 0}, {event_fd_, POLLIN, 0}};
    const int64_t wait_ms = std::max<int64_t>(0, absl::ToInt64Milliseconds(left));
    if (poll(fds, 2, static_cast<int>(wait_ms)) < 0 && errno != EINTR) return -1;
    signalfd_siginfo info;
    if (read(signal_fd_, &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
      return static_cast<int>(info.ssi_signo);
    }
    if (fds[1].revents & POLLIN) return -1;
    if (SystemClock::Get().Now() >= end) return 0;
  }
}

void ShutdownSignal::Trigger() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t wrote = write(event_fd_, &one, sizeof(one));
}

void RestoreSignalMask() {
  signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

}  // namespace zeroshard
