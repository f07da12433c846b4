#include "tests/hangs/stacks_of_a_hang.h"

#include <dirent.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "absl/debugging/symbolize.h"

namespace zeroshard {
namespace {

constexpr int kMostFrames = 40;
std::atomic<int> answered{0};

// Runs in each thread: nothing here may allocate or lock. (glibc is built without frame pointers;
// its own unwinder gets through it.)
void WriteOwnStack(int) {
  void* frames[kMostFrames];
  const int depth = backtrace(frames, kMostFrames);
  char line[512];
  int length = std::snprintf(line, sizeof(line), "thread %ld\n", syscall(SYS_gettid));
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, line, static_cast<size_t>(length));
  for (int i = 2; i < depth; ++i) {  // behind the signal's own
    char symbol[400] = "?";
    // A return address may be behind its function's end.
    absl::Symbolize(static_cast<char*>(frames[i]) - 1, symbol, sizeof(symbol));
    length = std::snprintf(line, sizeof(line), "  %2d %p %s\n", i, frames[i], symbol);
    written = write(STDERR_FILENO, line, std::min(static_cast<size_t>(length), sizeof(line) - 1));
  }
  ++answered;
}

// Set by ctest: TIMEOUT less a little.
[[maybe_unused]] const bool watched = [] {
  const char* seconds = std::getenv("ZEROSHARD_STACKS_AFTER");
  if (seconds == nullptr || std::atoi(seconds) <= 0) return false;
  WriteStacksAfter(std::chrono::seconds(std::atoi(seconds)));
  return true;
}();

}  // namespace

void WriteStacks() {
  absl::InitializeSymbolizer("/proc/self/exe");
  void* frame = nullptr;
  backtrace(&frame, 1);  // loads what it needs
  struct sigaction action = {};
  action.sa_handler = WriteOwnStack;
  action.sa_flags = SA_RESTART;
  const int signal = SIGRTMAX - 3;
  sigaction(signal, &action, nullptr);
  DIR* const tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return;
  while (const dirent* task = readdir(tasks)) {
    const int thread = std::atoi(task->d_name);
    if (thread <= 0 || thread == syscall(SYS_gettid)) continue;
    const int before = answered;
    if (syscall(SYS_tgkill, getpid(), thread, signal) != 0) continue;
    for (int ms = 0; ms < 1000 && answered == before; ++ms)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  closedir(tasks);
}

void WriteStacksAfter(std::chrono::seconds seconds) {
  std::thread([seconds] {
    std::this_thread::sleep_for(seconds);
    std::fprintf(stderr, "after %ld s this process does:\n", static_cast<long>(seconds.count()));
    WriteStacks();
  }).detach();
}

}  // namespace zeroshard
