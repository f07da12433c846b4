#include "client/child_process.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class ChildProcessTest : public testing::Test {
 protected:
  ChildProcessTest() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    log_ = (fs::path(testing::TempDir()) / absl::StrCat("child_", test->name(), "_", getpid()))
               .string();
  }
  ~ChildProcessTest() override { fs::remove(log_); }

  std::string Log() const {
    std::ostringstream text;
    text << std::ifstream(log_).rdbuf();
    return text.str();
  }

  static ExitInfo Await(pid_t pid) {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (absl::Now() < deadline) {
      if (const auto exit = ReapChild(pid)) return *exit;
      std::this_thread::yield();
    }
    ADD_FAILURE() << "child " << pid << " is still there";
    kill(pid, SIGKILL);
    return {};
  }

  std::string log_;
};

TEST_F(ChildProcessTest, OutputGoesToTheLogAndTheExitCodeIsSeen) {
  const auto pid = SpawnChild({"/bin/sh", "-c", "echo out; echo err >&2; exit 7"}, log_);
  ASSERT_TRUE(pid.ok()) << pid.status();
  const ExitInfo exit = Await(*pid);
  EXPECT_EQ(exit.exit_code, 7);
  EXPECT_EQ(exit.signal, 0);
  EXPECT_EQ(exit.ToString(), "ended with exit code 7");
  EXPECT_EQ(Log(), "out\nerr\n");
}

TEST_F(ChildProcessTest, SignalsAreSeen) {
  const auto pid = SpawnChild({"/bin/sh", "-c", "kill -9 $$"}, log_);
  ASSERT_TRUE(pid.ok()) << pid.status();
  const ExitInfo exit = Await(*pid);
  EXPECT_EQ(exit.signal, 9);
  EXPECT_EQ(exit.ToString(), "was killed by signal 9 (Killed)");
}

TEST_F(ChildProcessTest, InputIsEmpty) {
  const auto pid = SpawnChild({"/bin/cat"}, log_);
  ASSERT_TRUE(pid.ok()) << pid.status();
  EXPECT_EQ(Await(*pid).exit_code, 0);
}

TEST_F(ChildProcessTest, AMissingProgramIsAnErrorThatNamesIt) {
  const auto pid = SpawnChild({"/nowhere/program"}, log_);
  ASSERT_FALSE(pid.ok());
  EXPECT_THAT(std::string(pid.status().message()), HasSubstr("/nowhere/program"));
}

TEST_F(ChildProcessTest, AnUnwritableLogIsAnErrorThatNamesIt) {
  const auto pid = SpawnChild({"/bin/true"}, "/nowhere/log");
  ASSERT_FALSE(pid.ok());
  EXPECT_THAT(std::string(pid.status().message()), HasSubstr("/nowhere/log"));
}

// The process between stands for `zeroshard local` killed with -9: its child, which would run for
// ever, must go with it.
TEST_F(ChildProcessTest, AChildDiesWithAKilledParent) {
  int fds[2];
  ASSERT_EQ(pipe(fds), 0);
  const pid_t between = fork();
  ASSERT_GE(between, 0);
  if (between == 0) {
    close(fds[0]);
    const auto child = SpawnChild({"/bin/sleep", "600"}, log_);
    const pid_t pid = child.ok() ? *child : -1;
    _exit(write(fds[1], &pid, sizeof(pid)) == sizeof(pid) && pause() == 0 ? 0 : 1);
  }
  close(fds[1]);
  pid_t grandchild = -1;
  ASSERT_EQ(read(fds[0], &grandchild, sizeof(grandchild)), static_cast<ssize_t>(sizeof(pid_t)));
  close(fds[0]);
  ASSERT_GT(grandchild, 0);
  EXPECT_EQ(kill(grandchild, 0), 0);
  kill(between, SIGKILL);
  waitpid(between, nullptr, 0);

  const auto alive = [grandchild] {
    std::ifstream stat(absl::StrCat("/proc/", grandchild, "/stat"));
    std::string pid, name, state;
    return static_cast<bool>(stat >> pid >> name >> state) && state != "Z";
  };
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (alive() && absl::Now() < deadline) std::this_thread::yield();
  EXPECT_FALSE(alive());
}

}  // namespace
}  // namespace zeroshard
