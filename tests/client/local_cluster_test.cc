// The daemons that `zeroshard local` looks after, played by shell scripts, on a clock of the
// test's.
#include "client/local_cluster.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_jobs.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;

// Of real time, for a child to do what it must.
constexpr std::chrono::seconds kPatience(30);

class LocalClusterTest : public testing::Test {
 protected:
  LocalClusterTest() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / absl::StrCat("local_", test->name(), "_", getpid());
    fs::create_directories(folder_ / "bin");
    // Both write the port file that they are told and stay. With a file "broken" a worker ends at
    // once instead.
    WriteProgram("zeroshard-coordinator", "");
    WriteProgram("zeroshard-worker", absl::StrCat("[ -e ", (folder_ / "broken").string(),
                                                  " ] && { echo no memory for this; exit 7; }\n"));
    for (int i = 0; i < 2; ++i) {
      v1::Node node;
      node.set_state("idle");
      node.mutable_hello()->set_name(absl::StrCat("worker-", i));
      fake_.nodes.push_back(node);
    }
  }
  ~LocalClusterTest() override { fs::remove_all(folder_); }

  void WriteProgram(const std::string& name, const std::string& first) {
    const fs::path path = folder_ / "bin" / name;
    std::ofstream(path) << "#!/bin/sh\n"
                        << first << "while [ $# -gt 0 ]; do\n"
                        << "  [ \"$1\" = --port-file ] && to=$2\n  shift\ndone\n"
                        << "echo '{\"grpc\": \"" << fake_.address()
                        << "\", \"metrics\": \"\", \"pid\": '$$'}' > \"$to.part\"\n"
                        << "mv \"$to.part\" \"$to\"\nexec sleep 600\n";
    fs::permissions(path, fs::perms::owner_all);
  }

  // A started cluster of two workers for a job that needs `needed` of them.
  std::unique_ptr<LocalCluster> Start(int needed, LocalClusterOptions options = {}) {
    options.workdir = folder_.string();
    options.bin_dirs = {(folder_ / "bin").string()};
    options.workers = 2;
    options.needed_workers = needed;
    auto cluster = std::make_unique<LocalCluster>(
        options, &clock_,
        [](absl::Duration) {
          std::this_thread::yield();
          return absl::OkStatus();
        },
        [this](const std::string& text) { notices_.push_back(text); });
    EXPECT_EQ(cluster->StartCoordinator(), absl::OkStatus());
    client_ = *JobsClient::Create(fake_.address(), absl::Seconds(30));
    EXPECT_EQ(cluster->StartMembers(client_.get()), absl::OkStatus());
    return cluster;
  }
  void KillWorker(int number) { Kill(absl::StrCat("worker-", number)); }
  void Kill(const std::string& daemon) {
    const auto ports = ReadPortFile((folder_ / "run" / absl::StrCat(daemon, ".port")).string());
    ASSERT_TRUE(ports.ok()) << ports.status();
    ASSERT_EQ(kill(static_cast<pid_t>(ports->pid), SIGKILL), 0);
  }
  // Looks after the cluster until that fails or one is given up, moving time past the
  // pause that follows each death, which no child lives long enough to count as healthy for.
  absl::Status SuperviseUntilGivenUp(LocalCluster* cluster) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    size_t seen = 0;
    while (std::chrono::steady_clock::now() < end) {
      if (absl::Status status = cluster->Supervise(); !status.ok()) return status;
      if (!notices_.empty() && notices_.back().find("not started again") != std::string::npos) {
        return absl::OkStatus();
      }
      if (notices_.size() > seen) clock_.Advance(absl::Seconds(6));
      seen = notices_.size();
      std::this_thread::yield();
    }
    return absl::DeadlineExceededError("no worker was given up");
  }

  fs::path folder_;
  FakeJobs fake_;
  ManualClock clock_;
  std::vector<std::string> notices_;
  std::unique_ptr<JobsClient> client_;
};

TEST_F(LocalClusterTest, FailsWhenFewerWorkersAreLeftThanTheJobNeeds) {
  const auto cluster = Start(2);
  std::ofstream(folder_ / "broken") << "";
  KillWorker(1);
  const absl::Status status = SuperviseUntilGivenUp(cluster.get());
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("worker-1"), HasSubstr("no memory for this"),
                    HasSubstr("1 worker is left, the job needs 2")));
}

TEST_F(LocalClusterTest, GoesOnWithoutAWorkerThatTheJobDoesNotNeed) {
  const auto cluster = Start(1);
  std::ofstream(folder_ / "broken") << "";
  KillWorker(1);
  EXPECT_EQ(SuperviseUntilGivenUp(cluster.get()), absl::OkStatus());
  EXPECT_THAT(notices_, Contains(HasSubstr("it is started again")));
  EXPECT_EQ(cluster->Supervise(), absl::OkStatus());
}

// 0.25 s after the first death and twice as long after each one more, to the fifth; one that lived
// half a minute has died for the first time again.
TEST_F(LocalClusterTest, TheRestBeforeAStartDoublesWithEachDeath) {
  const fs::path starts = folder_ / "starts";
  WriteProgram("zeroshard-worker", absl::StrCat("[ -e ", (folder_ / "counted").string(),
                                                " ] && echo x >> ", starts.string(), "\n"));
  const auto cluster = Start(1);
  std::ofstream(folder_ / "counted") << "";
  const auto seen = [&] {
    std::error_code none;
    const auto size = fs::file_size(starts, none);
    return none ? 0 : static_cast<int>(size / 2);
  };
  const auto until = [&](const auto& done) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (!done() && std::chrono::steady_clock::now() < end) {
      ASSERT_EQ(cluster->Supervise(), absl::OkStatus());
      std::this_thread::yield();
    }
    ASSERT_TRUE(done());
  };
  const auto expect_rest = [&](absl::Duration rest, int started) {
    const size_t before = notices_.size();
    KillWorker(1);
    until([&] { return notices_.size() > before; });
    EXPECT_THAT(notices_.back(), HasSubstr("it is started again"));
    clock_.Advance(rest - absl::Milliseconds(1));
    ASSERT_EQ(cluster->Supervise(), absl::OkStatus());
    // Its port file goes when it is started.
    EXPECT_TRUE(fs::exists(folder_ / "run" / "worker-1.port")) << rest;
    EXPECT_EQ(seen(), started - 1) << rest;
    clock_.Advance(absl::Milliseconds(1));
    until([&] { return seen() == started; });
    until([&] { return fs::exists(folder_ / "run" / "worker-1.port"); });
  };
  for (int death = 1; death <= 5; ++death) {
    expect_rest(absl::Milliseconds(250) * (1 << (death - 1)), death);
  }
  clock_.Advance(absl::Seconds(31));
  expect_rest(absl::Milliseconds(250), 6);
}

// A store that ends at once when a file is there, and says what it was given.
TEST_F(LocalClusterTest, StoresHaveTheirMemoryAndAreNeededToo) {
  WriteProgram("zeroshard-store",
               absl::StrCat("echo \"$@\" >> ", (folder_ / "given").string(), "\n[ -e ",
                            (folder_ / "broken").string(), " ] && exit 7\n"));
  for (int i = 0; i < 2; ++i) {
    v1::Node node;
    node.set_state("idle");
    node.mutable_hello()->set_name(absl::StrCat("store-", i));
    fake_.nodes.push_back(node);
  }
  LocalClusterOptions options;
  options.stores = 2;
  options.needed_stores = 2;
  options.store_memory = 4096;
  const auto cluster = Start(2, options);
  std::ifstream given(folder_ / "given");
  std::string line;
  ASSERT_TRUE(std::getline(given, line));
  EXPECT_THAT(line, AllOf(HasSubstr("--memory-limit 4096"), Not(HasSubstr("--threads"))));
  EXPECT_EQ(cluster->MetricsAddresses().size(), 0u);  // these serve none
  std::ofstream(folder_ / "broken") << "";
  Kill("store-1");
  const absl::Status status = SuperviseUntilGivenUp(cluster.get());
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("store-1"), HasSubstr("1 store is left, the job needs 2")));
}

}  // namespace
}  // namespace zeroshard
