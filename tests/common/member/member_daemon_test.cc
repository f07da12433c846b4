// What a member's command line refuses, and how it ends where no coordinator takes it.
#include "common/member/member_daemon.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "common/exit_codes.h"
#include "common/health_client.h"
#include "common/member/host_info.h"
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

// Where others are told to find the metrics of a member with these addresses.
HostPort Advertised(const std::string& listen, const std::string& metrics_listen,
                    const std::string& advertise_host) {
  MemberDaemonOptions options;
  options.kind = v1::MEMBER_KIND_WORKER;
  options.program = "zeroshard-worker";
  options.name = "w0";
  options.listen = listen;
  options.metrics_listen = metrics_listen;
  options.advertise_host = advertise_host;
  options.security.insecure = true;
  auto daemon = MemberDaemon::Start(options);
  EXPECT_TRUE(daemon.ok()) << daemon.status();
  if (!daemon.ok()) return {};
  const std::string address = (*daemon)->MakeHello().metrics_address();
  if (address.empty()) return {};
  const auto parsed = ParseHostPort(address);
  EXPECT_TRUE(parsed.ok()) << address;
  EXPECT_EQ(parsed->port, (*daemon)->metrics().port());
  return *parsed;
}

TEST(MemberDaemonTest, AdvertisesNoMetricsThatNoOtherHostReaches) {
  EXPECT_EQ(Advertised("0.0.0.0:0", "127.0.0.1:0", "node-7").host, "");
  EXPECT_EQ(Advertised("0.0.0.0:0", "0.0.0.0:0", "node-7").host, "node-7");
  EXPECT_EQ(Advertised("0.0.0.0:0", "0.0.0.0:0", "").host, HostName());
  // A cluster of one host.
  EXPECT_EQ(Advertised("127.0.0.1:0", "127.0.0.1:0", "").host, "127.0.0.1");
}

bool Serves(const std::string& address, const std::string& service) {
  const auto serving = CheckHealth(address, service, absl::Seconds(30));
  EXPECT_TRUE(serving.ok()) << serving.status();
  return serving.ok() && *serving;
}

// Looks until it is so; false when it never is.
bool BecomesReady(const std::string& address, bool wanted) {
  const auto end = std::chrono::steady_clock::now() + FakeCluster::kPatience;
  while (Serves(address, "ready") != wanted) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

TEST(MemberDaemonTest, IsReadyWhileRegisteredAndNotWhileDrainingAndAliveAllTheTime) {
  FakeCluster cluster;
  ShutdownSignal signal;
  MemberDaemonOptions options;
  options.kind = v1::MEMBER_KIND_STORE;
  options.program = "zeroshard-store";
  options.name = "s0";
  options.coordinator = cluster.address();
  options.listen = options.metrics_listen = options.health_listen = "127.0.0.1:0";
  auto daemon = MemberDaemon::Start(options);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const std::string health = (*daemon)->health_address();
  EXPECT_TRUE(Serves(health, ""));
  EXPECT_FALSE(Serves(health, "ready")) << "before it is registered";

  MemberHandler handler;
  MemberSessionOptions session_options;
  session_options.coordinator = options.coordinator;
  session_options.hello = (*daemon)->MakeHello();
  session_options.first_backoff = absl::Milliseconds(10);
  session_options.most_backoff = absl::Milliseconds(100);
  MemberSession session(session_options, &handler);
  bool ready_while_draining = true, alive_while_draining = false;
  std::thread serving([&] {
    (*daemon)->ServeUntilSignal(&signal, &session, [&](const std::string&) {
      ready_while_draining = Serves(health, "ready");
      alive_while_draining = Serves(health, "");
    });
  });
  EXPECT_TRUE(BecomesReady(health, true));
  cluster.Stop();
  EXPECT_TRUE(BecomesReady(health, false)) << "without a coordinator";
  EXPECT_TRUE(Serves(health, "")) << "liveness depends on no peer";
  cluster.Start();
  EXPECT_TRUE(BecomesReady(health, true));
  signal.Trigger();
  serving.join();
  EXPECT_FALSE(ready_while_draining);
  EXPECT_TRUE(alive_while_draining);
}

}  // namespace
}  // namespace zeroshard
