// Clock, ids, log lines, files, exit codes, signals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <set>
#include <thread>

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/files.h"
#include "common/log.h"
#include "common/random_id.h"
#include "common/signals.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

TEST(Clock, AManualClockMovesOnlyWhenTold) {
  ManualClock clock;
  const absl::Duration now = clock.Now();
  const absl::Time wall = clock.Wall();
  EXPECT_EQ(clock.Now(), now);
  clock.Advance(absl::Seconds(3));
  EXPECT_EQ(clock.Now() - now, absl::Seconds(3));
  EXPECT_EQ(clock.Wall() - wall, absl::Seconds(3));
  clock.JumpWall(-absl::Hours(1));
  EXPECT_EQ(clock.Now() - now, absl::Seconds(3));
}

TEST(Clock, TheSystemClockDoesNotGoBack) {
  absl::Duration last = SystemClock::Get().Now();
  EXPECT_GE(last, absl::ZeroDuration());
  for (int i = 0; i < 1000; ++i) {
    const absl::Duration now = SystemClock::Get().Now();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(RandomId, Is32HexDigitsAndNeverTheSame) {
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) {
    const std::string id = RandomId();
    ASSERT_EQ(id.size(), 32u);
    for (const char c : id) ASSERT_TRUE(std::isxdigit(c) && !std::isupper(c)) << id;
    ASSERT_TRUE(ids.insert(id).second);
  }
}

TEST(Log, ALineHasTimeLevelComponentAndText) {
  const absl::Time when = absl::FromUnixMillis(1767323045678);
  EXPECT_EQ(FormatLogLine(when, LogLevel::kInfo, "worker-0", "ready"),
            "2026-01-02T03:04:05.678Z INFO worker-0: ready");
  EXPECT_EQ(FormatLogLine(when, LogLevel::kError, "c", "a\nb\x01"),
            "2026-01-02T03:04:05.678Z ERROR c: a\\nb\\x01");
}

TEST(Log, TheSinkGetsWholeLinesOfEveryThreadAndNothingBelowTheLevel) {
  std::mutex mutex;
  std::vector<std::string> lines;
  SetLogSink([&](LogLevel level, const std::string& line) {
    std::lock_guard<std::mutex> lock(mutex);
    lines.push_back(line);
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 5; ++i) LogInfo("number ", i);
      LogDebug("not shown");
    });
  }
  for (std::thread& thread : threads) thread.join();
  SetLogSink(nullptr);
  LogInfo("not to the sink");
  ASSERT_EQ(lines.size(), 20u);
  for (const std::string& line : lines) EXPECT_THAT(line, HasSubstr("INFO zeroshard: number "));
}

TEST(Files, AnAtomicWriteReplacesTheWholeFileAndLeavesNothingElse) {
  TempFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder / "f", "a long first text").ok());
  ASSERT_TRUE(WriteFileAtomically(folder / "f", "short").ok());
  EXPECT_EQ(*ReadFile(folder / "f"), "short");
  int entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    ++entries;
  }
  EXPECT_EQ(entries, 1);
}

TEST(Files, APipeIsRefusedAndNotWaitedFor) {
  TempFolder folder;
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(ReadFile(pipe).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Files, ErrorsNameThePathAndTheReason) {
  TempFolder folder;
  const absl::Status write = WriteFileAtomically(folder / "absent/f", "x");
  EXPECT_EQ(write.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(write.message()), HasSubstr("absent/f"));
  EXPECT_EQ(ReadFile(folder / "f").status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(WriteFileAtomically(folder / "f", "12345").ok());
  EXPECT_EQ(ReadFile(folder / "f", 4).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_FALSE(MakeFolders(folder / "f").ok());
  EXPECT_TRUE(MakeFolders(folder / "a/b/c").ok());
  EXPECT_TRUE(MakeFolders(folder / "a/b/c").ok());
}

TEST(Files, APortFileIsReadBackAndAnythingElseRefused) {
  TempFolder folder;
  ASSERT_TRUE(WritePortFile(folder / "p", {"127.0.0.1:1", "[::1]:2", 77}).ok());
  const auto ports = ReadPortFile(folder / "p");
  ASSERT_TRUE(ports.ok());
  EXPECT_EQ(ports->grpc, "127.0.0.1:1");
  EXPECT_EQ(ports->metrics, "[::1]:2");
  EXPECT_EQ(ports->pid, 77);
  EXPECT_EQ(ReadPortFile(folder / "absent").status().code(), absl::StatusCode::kNotFound);
  for (const char* text : {"", "[]", "{\"grpc\":1}", "{\"grpc\":\"a\",\"metrics\":\"b\"}"}) {
    ASSERT_TRUE(WriteFileAtomically(folder / "q", text).ok());
    EXPECT_EQ(ReadPortFile(folder / "q").status().code(), absl::StatusCode::kInvalidArgument)
        << text;
  }
}

TEST(ExitCodes, FollowTheStatus) {
  EXPECT_EQ(ExitCodeFor(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCodeFor(absl::InternalError("")), 1);
  EXPECT_EQ(ExitCodeFor(absl::InvalidArgumentError("")), 2);
  EXPECT_EQ(ExitCodeFor(absl::UnavailableError("")), 3);
  EXPECT_EQ(ExitCodeFor(absl::AlreadyExistsError("")), 4);
  EXPECT_EQ(ExitCodeFor(absl::NotFoundError("")), 5);
}

// In processes of their own: signals and masks belong to the whole process.
int InAChild(int (*body)()) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST(ShutdownSignal, ReturnsEachSignalOnceAndTheTimeout) {
  EXPECT_EQ(InAChild([] {
              ShutdownSignal shutdown;
              kill(getpid(), SIGTERM);
              if (shutdown.Wait(absl::Seconds(30)) != SIGTERM) return 1;
              if (shutdown.Wait(absl::ZeroDuration()) != 0) return 2;
              kill(getpid(), SIGINT);
              return shutdown.Wait(absl::Seconds(30)) == SIGINT ? 0 : 3;
            }),
            0);
}

TEST(ShutdownSignal, TriggerWakesForEver) {
  EXPECT_EQ(InAChild([] {
              ShutdownSignal shutdown;
              shutdown.Trigger();
              return shutdown.Wait() == -1 && shutdown.Wait() == -1 ? 0 : 1;
            }),
            0);
}

TEST(ShutdownSignal, ARestoredMaskLetsSignalsKillAgain) {
  EXPECT_EQ(InAChild([] {
              ShutdownSignal shutdown;
              RestoreSignalMask();
              raise(SIGTERM);
              return 0;
            }),
            1000 + SIGTERM);
}

}  // namespace
}  // namespace zeroshard
