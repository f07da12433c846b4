#include "client/child_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/signals.h"

namespace zeroshard {
namespace {

constexpr int kExecFailed = 127;

// Runs in the child, where only async-signal-safe calls are allowed: other threads' locks may be
// held for ever. Returns errno only if something failed.
int BecomeProgram(pid_t parent, char* const* argv, int input, int log) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
  // The parent may have died before that: then nobody will send the signal.
  if (getppid() != parent) _exit(kExecFailed);
  if (setpgid(0, 0) != 0) return errno;
  if (dup2(input, STDIN_FILENO) < 0 || dup2(log, STDOUT_FILENO) < 0 ||
      dup2(log, STDERR_FILENO) < 0) {
    return errno;
  }
  close_range(STDERR_FILENO + 1, ~0U, CLOSE_RANGE_CLOEXEC);
  RestoreSignalMask();
  execv(argv[0], argv);
  return errno;
}

absl::Status Failed(int error, absl::string_view doing, const std::string& path) {
  return ErrnoError(error, doing, path);
}

}  // namespace

std::string ExitInfo::ToString() const {
  if (signal != 0)
    return absl::StrCat("was killed by signal ", signal, " (", strsignal(signal), ")");
  return absl::StrCat("ended with exit code ", exit_code);
}

absl::StatusOr<pid_t> SpawnChild(const std::vector<std::string>& argv,
                                 const std::string& log_path) {
  std::vector<char*> pointers;
  for (const std::string& argument : argv) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);

  const int log = open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (log < 0) return Failed(errno, "cannot write", log_path);
  const int input = open("/dev/null", O_RDONLY | O_CLOEXEC);
  int report[2];
  if (input < 0 || pipe2(report, O_CLOEXEC) != 0) {
    const int error = errno;
    close(log);
    if (input >= 0) close(input);
    return Failed(error, "cannot start", argv[0]);
  }

  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    const int error = BecomeProgram(parent, pointers.data(), input, log);
    const ssize_t ignored = write(report[1], &error, sizeof(error));
    _exit(ignored == sizeof(error) ? kExecFailed : kExecFailed + 1);
  }
  const int fork_error = errno;
  close(report[1]);
  close(input);
  close(log);
  int error = 0;
  ssize_t bytes = 0;
  // The pipe closes without a word when exec succeeds.
  if (pid > 0) {
    do {
      bytes = read(report[0], &error, sizeof(error));
    } while (bytes < 0 && errno == EINTR);
  }
  close(report[0]);
  if (pid < 0) return Failed(fork_error, "cannot start", argv[0]);
  if (bytes == sizeof(error)) {
    waitpid(pid, nullptr, 0);
    return Failed(error, "cannot start", argv[0]);
  }
  return pid;
}

std::optional<ExitInfo> ReapChild(pid_t pid) {
  int status = 0;
  const pid_t ended = waitpid(pid, &status, WNOHANG);
  if (ended != pid) return std::nullopt;
  ExitInfo info;
  if (WIFSIGNALED(status)) {
    info.signal = WTERMSIG(status);
  } else {
    info.exit_code = WEXITSTATUS(status);
  }
  return info;
}

}  // namespace zeroshard
