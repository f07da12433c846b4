#include "tests/cluster/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace zeroshard::cluster {

Process::Process(const std::vector<std::string>& argv, const std::string& prefix)
    : prefix_(prefix) {
  std::vector<char*> pointers;
  for (const std::string& argument : argv) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  const int out = open((prefix + ".out").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  const int err = open((prefix + ".err").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    execv(pointers[0], pointers.data());
    _exit(127);
  }
  close(out);
  close(err);
  if (pid_ < 0) ADD_FAILURE() << "fork failed";
}

Process::~Process() {
  if (ended_ || pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void Process::Signal(int signal) {
  if (!Ended()) kill(pid_, signal);
}

bool Process::Ended() {
  if (ended_) return true;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return false;
  ended_ = true;
  code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return true;
}

int Process::Wait(absl::Duration deadline) {
  if (!Eventually(deadline, [this] { return Ended(); })) {
    ADD_FAILURE() << "still running after " << absl::FormatDuration(deadline) << "\n"
                  << Out() << Err();
    return -1;
  }
  return code_;
}

std::string Process::Out() const { return ReadText(prefix_ + ".out"); }
std::string Process::Err() const { return ReadText(prefix_ + ".err"); }

bool Eventually(absl::Duration deadline, const std::function<bool()>& condition) {
  const absl::Time until = absl::Now() + deadline;
  while (!condition()) {
    if (absl::Now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

bool IsAlive(pid_t pid) {
  const std::string stat = ReadText(absl::StrCat("/proc/", pid, "/stat"));
  const size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && name_end + 2 < stat.size() && stat[name_end + 2] != 'Z';
}

std::string ReadText(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace zeroshard::cluster
