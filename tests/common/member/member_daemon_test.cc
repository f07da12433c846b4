// What a member's command line refuses, and how it ends where no coordinator takes it.
#include "common/member/member_daemon.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/exit_codes.h"
#include "tests/common/member/fake_cluster.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

int Parse(std::vector<const char*> arguments, MemberDaemonOptions* options) {
  options->program = "zeroshard-store";
  CLI::App app("A member");
  AddMemberOptions(&app, options);
  arguments.insert(arguments.begin(), "zeroshard-store");
  bool go_on = false;
  const int code = ParseOrExitCode(&app, static_cast<int>(arguments.size()),
                                   const_cast<char**>(arguments.data()), &go_on);
  EXPECT_EQ(go_on, code == kExitOk);
  return code;
}

TEST(MemberDaemonTest, AnEmptyNameIsRefusedInOneLineWithTheProgramsName) {
  MemberDaemonOptions options;
  testing::internal::CaptureStderr();
  EXPECT_EQ(Parse({"--name", ""}, &options), kExitUsage);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, AllOf(testing::StartsWith("zeroshard-store: --name: "), HasSubstr("empty"),
                          EndsWith("--help\n")));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_EQ(Parse({"--name", "s0"}, &options), kExitOk);
  EXPECT_EQ(options.name, "s0");
}

// The exit code of a member that nobody takes within a second, and what it says.
int GiveUp(const std::string& coordinator, std::string* said) {
  ShutdownSignal signal;
  MemberDaemonOptions options;
  options.kind = v1::MEMBER_KIND_STORE;
  options.program = "zeroshard-store";
  options.name = "s0";
  options.coordinator = coordinator;
  options.listen = options.metrics_listen = "127.0.0.1:0";
  options.connect_timeout_seconds = 1;
  auto daemon = MemberDaemon::Start(options);
  EXPECT_TRUE(daemon.ok()) << daemon.status();
  if (!daemon.ok()) return -1;
  MemberHandler handler;
  MemberSessionOptions session_options;
  session_options.coordinator = coordinator;
  session_options.hello = (*daemon)->MakeHello();
  session_options.first_backoff = absl::Milliseconds(10);
  MemberSession session(session_options, &handler);
  testing::internal::CaptureStderr();
  const int code = (*daemon)->ServeUntilSignal(&signal, &session, [](const std::string&) {});
  *said = testing::internal::GetCapturedStderr();
  return code;
}

TEST(MemberDaemonTest, ATakenNameIsAConflictAndNoMissingCoordinator) {
  FakeCluster cluster;
  cluster.With([](auto& state) {
    state.answer = [](const v1::Hello& hello) {
      return FakeCluster::Refusal("the name " + hello.name() + " is taken by pid 7", false);
    };
  });
  std::string said;
  EXPECT_EQ(GiveUp(cluster.address(), &said), kExitConflict);
  EXPECT_THAT(said, AllOf(HasSubstr("the name s0 is taken by pid 7"), HasSubstr(cluster.address()),
                          Not(HasSubstr("no coordinator")), Not(HasSubstr("--coordinator"))));
}

TEST(MemberDaemonTest, WhereNobodyAnswersTheCoordinatorIsMissing) {
  FakeCluster cluster;
  const std::string address = cluster.address();
  cluster.Stop();
  std::string said;
  EXPECT_EQ(GiveUp(address, &said), kExitUnavailable);
  EXPECT_THAT(said, AllOf(HasSubstr("no coordinator at " + address), HasSubstr("--coordinator")));
}

}  // namespace
}  // namespace zeroshard
