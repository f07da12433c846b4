// A member's session: what it says, what it hands on, and how it comes back.
#include "common/member/member_session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <set>

#include "common/security/security.h"
#include "tests/common/member/fake_cluster.h"
#include "tests/common/security/certificates.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Recorder : public MemberHandler {
 public:
  void OnAssign(const v1::Assign& assign) override {
    std::lock_guard<std::mutex> lock(mutex_);
    assigned_.push_back(assign.run_id());
    changed_.notify_all();
  }
  void OnStop(const v1::Stop& stop) override {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_.push_back(stop.run_id() + ": " + stop.reason());
    changed_.notify_all();
  }
  void OnStore(const v1::StoreDirective& directive) override {
    std::lock_guard<std::mutex> lock(mutex_);
    directives_.push_back(directive.run_id());
    changed_.notify_all();
  }
  void OnWelcome() override {
    std::lock_guard<std::mutex> lock(mutex_);
    ++welcomes_;
    changed_.notify_all();
  }
  void OnFenced(const std::string& reason) override {
    std::lock_guard<std::mutex> lock(mutex_);
    fenced_.push_back(reason);
    changed_.notify_all();
  }
  bool Running(v1::Fence* fence, v1::Progress* progress) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (run_.empty()) return false;
    fence->set_run_id(run_);
    progress->set_step(++step_);
    progress->set_phase("forward");
    return true;
  }
  void Run(const std::string& run) {
    std::lock_guard<std::mutex> lock(mutex_);
    run_ = run;
  }
  bool Await(const std::function<bool(Recorder&)>& holds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, FakeCluster::kPatience, [&] { return holds(*this); });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> assigned_, stopped_, fenced_, directives_;
  int welcomes_ = 0;
  std::string run_;
  uint64_t step_ = 0;
};

MemberSessionOptions Options(const FakeCluster& cluster) {
  MemberSessionOptions options;
  options.coordinator = cluster.address();
  options.hello.set_kind(v1::MEMBER_KIND_WORKER);
  options.hello.set_name("worker-0");
  options.first_backoff = absl::Milliseconds(5);
  options.most_backoff = absl::Milliseconds(50);
  return options;
}

TEST(MemberSessionTest, SaysHelloThenSendsHeartbeatsWithWhatRuns) {
  FakeCluster cluster;
  Recorder recorder;
  MemberSession session(Options(cluster), &recorder);
  ASSERT_TRUE(session.WaitWelcome(absl::Seconds(30)).ok());
  ASSERT_TRUE(cluster.Await([](const auto& state) { return state.heartbeats.size() >= 2; }));
  cluster.With([&](auto& state) {
    EXPECT_EQ(state.hellos.at(0).name(), "worker-0");
    EXPECT_EQ(state.hellos.at(0).incarnation(), session.incarnation());
    EXPECT_EQ(session.incarnation().size(), 32u);
    EXPECT_FALSE(state.hellos.at(0).has_running());
    EXPECT_FALSE(state.heartbeats.at(0).has_running());
    EXPECT_LT(state.heartbeats.at(0).sequence(), state.heartbeats.at(1).sequence());
  });
  recorder.Run("a-1");
  ASSERT_TRUE(cluster.Await([](const auto& state) {
    return state.heartbeats.back().running().run_id() == "a-1" &&
           state.heartbeats.back().progress().step() >= 3;
  }));
}

TEST(MemberSessionTest, HandsOnAssignmentsAndStops) {
  FakeCluster cluster;
  Recorder recorder;
  MemberSession session(Options(cluster), &recorder);
  ASSERT_TRUE(cluster.Await([](const auto& state) { return !state.heartbeats.empty(); }));
  v1::CoordinatorMessage message;
  message.mutable_assign()->set_run_id("a-1");
  cluster.Send(message);
  message.mutable_stop()->set_run_id("a-1");
  message.mutable_stop()->set_reason("cancelled");
  cluster.Send(message);
  ASSERT_TRUE(recorder.Await([](Recorder& r) { return !r.stopped_.empty(); }));
  EXPECT_THAT(recorder.assigned_, testing::ElementsAre("a-1"));
  EXPECT_THAT(recorder.stopped_, testing::ElementsAre("a-1: cancelled"));
}

TEST(MemberSessionTest, ComesBackToARestartedCoordinatorAsTheSameProcessAndSaysWhatRuns) {
  FakeCluster cluster;
  Recorder recorder;
  recorder.Run("a-1");
  MemberSession session(Options(cluster), &recorder);
  ASSERT_TRUE(cluster.Await([](const auto& state) { return !state.heartbeats.empty(); }));
  const std::string incarnation = session.incarnation();
  cluster.Stop();
  cluster.With([](auto& state) { state.heartbeats.clear(); });
  cluster.Start();
  ASSERT_TRUE(cluster.Await(
      [](const auto& state) { return state.hellos.size() >= 2 && !state.heartbeats.empty(); }));
  cluster.With([&](auto& state) {
    EXPECT_EQ(state.hellos.back().incarnation(), incarnation);
    EXPECT_EQ(state.hellos.back().running().run_id(), "a-1");
    EXPECT_GT(state.hellos.back().progress().step(), 0u);
  });
}

// What a session without success says of the address.
std::string Unwelcome(const std::string& address) {
  MemberSessionOptions options;
  options.coordinator = address;
  options.hello.set_kind(v1::MEMBER_KIND_WORKER);
  options.first_backoff = absl::Milliseconds(5);
  options.most_backoff = absl::Milliseconds(50);
  Recorder recorder;
  MemberSession session(options, &recorder);
  absl::Status status;
  const auto until = std::chrono::steady_clock::now() + FakeCluster::kPatience;
  do {
    status = session.WaitWelcome(absl::Milliseconds(50));
  } while (absl::IsDeadlineExceeded(status) && std::chrono::steady_clock::now() < until);
  EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
  return std::string(status.message());
}

TEST(MemberSessionTest, SaysWhereTlsIsTheReasonThatNobodyAnswers) {
  std::signal(SIGPIPE, SIG_IGN);  // as in the daemons
  const TempFolder folder;
  const security::TestAuthority authority("one");
  const std::string ca = folder / "ca.crt";
  security::WriteWhole(ca, authority.Pem());
  const auto load = [&](const char* name, security::Role role) {
    const security::Files files = authority.Issue(folder / name, security::UriOf(role));
    auto loaded = security::Security::Load({files.cert, files.key, ca, "", false}, role);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return *loaded;
  };
  auto guarded = GrpcServer::Start(
      {.listen = "127.0.0.1:0", .security = load("c", security::Role::kCoordinator)});
  ASSERT_TRUE(guarded.ok()) << guarded.status();
  EXPECT_THAT(Unwelcome((*guarded)->address()),
              AllOf(HasSubstr((*guarded)->address() + " speaks TLS"), HasSubstr("--tls-ca")));

  FakeCluster open;
  security::SetProcessSecurity(load("w", security::Role::kWorker));
  const std::string said = Unwelcome(open.address());
  security::SetProcessSecurity(security::Security::Plaintext());
  EXPECT_THAT(said,
              AllOf(HasSubstr(open.address() + " does not speak TLS"), HasSubstr("--tls-cert")));
}

TEST(MemberSessionTest, KeepsTryingWhileItIsRefused) {
  FakeCluster cluster;
  cluster.With([](auto& state) {
    state.answer = [](const v1::Hello&) {
      return FakeCluster::Refusal("worker-0 is taken by pid 7 on host-b", false);
    };
  });
  Recorder recorder;
  MemberSession session(Options(cluster), &recorder);
  ASSERT_TRUE(cluster.Await([](const auto& state) { return state.hellos.size() >= 3; }));
  const absl::Status status = session.WaitWelcome(absl::ZeroDuration());
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr(cluster.address()), HasSubstr("refused this member"),
                    HasSubstr("worker-0 is taken by pid 7 on host-b")));
  cluster.With([&](auto& state) {
    for (const v1::Hello& hello : state.hellos) {
      EXPECT_EQ(hello.incarnation(), session.incarnation());
    }
    state.answer = [](const v1::Hello&) { return FakeCluster::Welcome(1); };
  });
  EXPECT_TRUE(session.WaitWelcome(absl::Seconds(30)).ok());
}

TEST(MemberSessionTest, AFencedMemberComesBackAsAnotherOnceItIsIdle) {
  FakeCluster cluster;
  Recorder recorder;
  recorder.Run("a-1");
  std::string first;
  cluster.With([&](auto& state) {
    state.answer = [&first](const v1::Hello& hello) {
      if (first.empty()) first = hello.incarnation();
      return hello.incarnation() == first ? FakeCluster::Refusal("lost for 20 s", true)
                                          : FakeCluster::Welcome(1);
    };
  });
  MemberSession session(Options(cluster), &recorder);
  ASSERT_TRUE(recorder.Await([](Recorder& r) { return !r.fenced_.empty(); }));
  EXPECT_THAT(recorder.fenced_.at(0), HasSubstr("lost for 20 s"));
  cluster.With([](auto& state) { EXPECT_EQ(state.hellos.size(), 1u); });  // not while it runs
  EXPECT_EQ(session.incarnation(), first);
  recorder.Run("");
  session.Poke();
  ASSERT_TRUE(session.WaitWelcome(absl::Seconds(30)).ok());
  EXPECT_NE(session.incarnation(), first);
  cluster.With([](auto& state) { EXPECT_FALSE(state.hellos.back().has_running()); });
}

TEST(MemberSessionTest, LeavesACoordinatorThatFellSilent) {
  FakeCluster cluster;
  cluster.With([](auto& state) {
    state.acknowledge = false;
    state.answer = [](const v1::Hello&) { return FakeCluster::Welcome(1, /*timeout_ms=*/50); };
  });
  Recorder recorder;
  MemberSession session(Options(cluster), &recorder);
  EXPECT_TRUE(cluster.Await([](const auto& state) { return state.hellos.size() >= 2; }));
}

TEST(MemberSessionTest, GivesUpOnAConnectionWhoseHelloIsNotAnswered) {
  FakeCluster cluster;
  cluster.With([](auto& state) {
    state.answer = [](const v1::Hello&) { return v1::CoordinatorMessage(); };
  });
  Recorder recorder;
  MemberSessionOptions options = Options(cluster);
  options.welcome_timeout = absl::Milliseconds(50);
  MemberSession session(options, &recorder);
  EXPECT_TRUE(cluster.Await([](const auto& state) { return state.hellos.size() >= 2; }));
  EXPECT_FALSE(session.connected());
}

// A coordinator whose disk is full answers nobody; it must hear of a member in time afterwards.
TEST(MemberSessionTest, SaysHelloTwiceInTheTimeInWhichItMustBeHeardOnceItWasWelcomed) {
  FakeCluster cluster;
  cluster.With([](auto& state) {
    state.acknowledge = false;
    state.answer = [](const v1::Hello&) { return FakeCluster::Welcome(1, /*timeout_ms=*/1500); };
  });
  Recorder recorder;
  MemberSessionOptions options = Options(cluster);
  options.welcome_timeout = absl::Minutes(5);
  options.first_backoff = options.most_backoff = absl::Minutes(5);
  MemberSession session(options, &recorder);
  ASSERT_TRUE(session.WaitWelcome(absl::Seconds(30)).ok());
  cluster.With([](auto& state) {
    state.answer = [](const v1::Hello&) { return v1::CoordinatorMessage(); };
  });
  EXPECT_TRUE(cluster.Await([](const auto& state) { return state.hellos.size() >= 4; }));
}

TEST(MemberSessionTest, ADeposedCoordinatorIsNotFollowed) {
  FakeCluster cluster;
  cluster.With(
      [](auto& state) { state.answer = [](const v1::Hello&) { return FakeCluster::Welcome(5); }; });
  Recorder recorder;
  MemberSession session(Options(cluster), &recorder);
  ASSERT_TRUE(cluster.Await([](const auto& state) { return !state.heartbeats.empty(); }));
  cluster.Stop();
  cluster.With([](auto& state) {
    state.hellos.clear();
    state.heartbeats.clear();
    state.answer = [](const v1::Hello&) { return FakeCluster::Welcome(4); };
  });
  cluster.Start();
  ASSERT_TRUE(cluster.Await([](const auto& state) { return state.hellos.size() >= 3; }));
  cluster.With([](auto& state) { EXPECT_TRUE(state.heartbeats.empty()); });
}

TEST(MemberSessionTest, SaysGoodbyeWhenItLeaves) {
  FakeCluster cluster;
  Recorder recorder;
  MemberSession session(Options(cluster), &recorder);
  ASSERT_TRUE(session.WaitWelcome(absl::Seconds(30)).ok());
  v1::Fence run;
  run.set_run_id("a-1");
  session.log_queue()->SetRun(std::make_shared<v1::Fence>(run));
  session.log_queue()->Add("last words");
  session.Leave("told to leave (SIGTERM)", absl::Seconds(30));
  ASSERT_TRUE(cluster.Await([](const auto& state) { return state.sessions == 0; }));
  cluster.With([](auto& state) {
    EXPECT_THAT(state.goodbyes, testing::ElementsAre("told to leave (SIGTERM)"));
    ASSERT_EQ(state.logs.size(), 1u);
    EXPECT_THAT(state.logs.at(0).lines(), testing::ElementsAre("last words"));
  });
}

TEST(MemberSessionTest, LinesOfTheRunReachTheCoordinator) {
  FakeCluster cluster;
  Recorder recorder;
  MemberSession session(Options(cluster), &recorder);
  v1::Fence run;
  run.set_run_id("a-1");
  session.log_queue()->SetRun(std::make_shared<v1::Fence>(run));
  session.log_queue()->Add("step 1");
  ASSERT_TRUE(cluster.Await([](const auto& state) { return !state.logs.empty(); }));
  cluster.With([](auto& state) {
    EXPECT_EQ(state.logs.at(0).running().run_id(), "a-1");
    EXPECT_THAT(state.logs.at(0).lines(), testing::ElementsAre("step 1"));
  });
}

v1::StoreReport Report(const std::string& run, uint64_t progress) {
  v1::StoreReport report;
  report.set_run_id(run);
  report.set_progress(progress);
  return report;
}

TEST(MemberSessionTest, DirectivesAreHandedOnAndEachWelcomeIsTold) {
  FakeCluster cluster;
  Recorder recorder;
  MemberSession session(Options(cluster), &recorder);
  ASSERT_TRUE(cluster.Await([](const auto& state) { return !state.heartbeats.empty(); }));
  v1::CoordinatorMessage message;
  message.mutable_store()->set_run_id("a-1");
  cluster.Send(message);
  ASSERT_TRUE(recorder.Await([](Recorder& r) { return !r.directives_.empty(); }));
  EXPECT_THAT(recorder.directives_, testing::ElementsAre("a-1"));
  EXPECT_EQ(recorder.welcomes_, 1);
  cluster.Stop();
  cluster.Start();
  EXPECT_TRUE(recorder.Await([](Recorder& r) { return r.welcomes_ == 2; }));
}

TEST(MemberSessionTest, OfReportsThatWaitOnlyTheNewestOfARunIsSent) {
  FakeCluster cluster;
  cluster.Stop();
  Recorder recorder;
  MemberSession session(Options(cluster), &recorder);
  for (uint64_t progress = 1; progress <= 9; ++progress)
    session.SendReport(Report("a-1", progress));
  session.SendReport(Report("b-1", 1));
  cluster.Start();
  ASSERT_TRUE(cluster.Await([](const auto& state) { return state.reports.size() >= 2; }));
  cluster.With([](auto& state) {
    ASSERT_EQ(state.reports.size(), 2u);
    EXPECT_EQ(state.reports[0].run_id(), "a-1");
    EXPECT_EQ(state.reports[0].progress(), 9u);
    EXPECT_EQ(state.reports[1].run_id(), "b-1");
  });
}

TEST(MemberSessionTest, ReportsAreSentAtOnceAndHeartbeatsGoOn) {
  FakeCluster cluster;
  cluster.With([](auto& state) {
    state.answer = [](const v1::Hello&) {
      auto welcome = FakeCluster::Welcome(1);
      welcome.mutable_welcome()->set_heartbeat_interval_ms(60000);
      return welcome;
    };
  });
  Recorder recorder;
  MemberSession session(Options(cluster), &recorder);
  ASSERT_TRUE(session.WaitWelcome(absl::Seconds(30)).ok());
  for (int run = 0; run < 50; ++run) {
    v1::StoreReport report = Report("run-" + std::to_string(run), 1);
    for (int chunk = 0; chunk < 1000; ++chunk) report.add_chunk_digests(1);
    session.SendReport(report);
  }
  session.Poke();
  ASSERT_TRUE(cluster.Await([](const auto& state) {
    return state.reports.size() == 50 && state.heartbeats.size() >= 2;
  }));
}

TEST(MemberSessionTest, ReportsOfAnIncarnationThatWasFencedAreNotSent) {
  FakeCluster cluster;
  Recorder recorder;
  std::string first;
  cluster.With([&](auto& state) {
    state.answer = [&first](const v1::Hello& hello) {
      if (first.empty()) first = hello.incarnation();
      return hello.incarnation() == first ? FakeCluster::Refusal("lost", true)
                                          : FakeCluster::Welcome(1);
    };
  });
  recorder.Run("a-1");  // keeps the session from coming back before the report is there
  MemberSession session(Options(cluster), &recorder);
  ASSERT_TRUE(recorder.Await([](Recorder& r) { return !r.fenced_.empty(); }));
  session.SendReport(Report("old", 1));
  recorder.Run("");
  session.Poke();
  ASSERT_TRUE(session.WaitWelcome(absl::Seconds(30)).ok());
  session.SendReport(Report("new", 1));
  ASSERT_TRUE(cluster.Await([](const auto& state) { return !state.reports.empty(); }));
  cluster.With([](auto& state) { EXPECT_EQ(state.reports[0].run_id(), "new"); });
}

TEST(MemberSessionTest, EndsPromptlyWhileNobodyAnswers) {
  FakeCluster cluster;
  cluster.Stop();
  Recorder recorder;
  MemberSessionOptions options = Options(cluster);
  options.most_backoff = options.first_backoff = absl::Hours(1);
  MemberSession session(options, &recorder);
  EXPECT_EQ(session.WaitWelcome(absl::Milliseconds(1)).code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace zeroshard
