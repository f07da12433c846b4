#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::HasSubstr;
using Kind = v1::CoordinatorMessage;

std::string StateOf(Harness& h, const std::string& name) {
  for (const v1::Node& node : h.core().Nodes(Moment{h.now(), 0})) {
    if (node.hello().name() == name) return node.state();
  }
  return "absent";
}

TEST(Membership, HelloIsAnsweredWithTheTermAndTheTimes) {
  Harness h;
  const FakeMember& member = h.Join("worker-0");
  const auto* welcome = member.Last(Kind::kWelcome);
  ASSERT_NE(welcome, nullptr);
  EXPECT_EQ(welcome->welcome().term(), 1);
  EXPECT_EQ(welcome->welcome().cluster_id(), "cluster-1");
  EXPECT_EQ(welcome->welcome().heartbeat_interval_ms(), 1000);
  EXPECT_EQ(welcome->welcome().member_timeout_ms(), 10000);
}

TEST(Membership, HeartbeatsAreAcknowledgedAndKeepAMemberAlive) {
  Harness h;
  h.Join("worker-0");
  h.AdvanceBeating(absl::Seconds(60), {"worker-0"});
  EXPECT_NE(h.member("worker-0").Last(Kind::kAck), nullptr);
  EXPECT_EQ(StateOf(h, "worker-0"), "idle");
}

TEST(Membership, ASilentMemberIsLostAtTheTimeoutAndNotBefore) {
  Harness h;
  const SessionId session = h.Join("worker-0").session;
  h.Advance(absl::Milliseconds(9500));
  EXPECT_EQ(StateOf(h, "worker-0"), "idle");
  h.Advance(absl::Milliseconds(500));
  EXPECT_EQ(StateOf(h, "worker-0"), "lost");
  EXPECT_TRUE(h.IsClosed(session));
}

// Heartbeats of many members come far more often than ticks are due; they must not put them off.
TEST(Membership, ASilentMemberAmongManyThatBeatIsLostAtTheTimeout) {
  Harness h;
  h.JoinMany(8);
  const std::vector<std::string> beating = {"worker-1", "worker-2", "worker-3", "worker-4",
                                            "worker-5", "worker-6", "worker-7"};
  h.AdvanceOnDeadlines(absl::Milliseconds(8500), beating, absl::Milliseconds(130));
  EXPECT_EQ(StateOf(h, "worker-0"), "idle");
  h.AdvanceOnDeadlines(absl::Seconds(3), beating, absl::Milliseconds(130));
  EXPECT_EQ(StateOf(h, "worker-0"), "lost");
  EXPECT_EQ(StateOf(h, "worker-1"), "idle");
}

TEST(Membership, ALostIncarnationIsRefusedForEverAndSurvivesARestart) {
  Harness h;
  h.Join("worker-0");
  h.Advance(absl::Seconds(10));
  for (int i = 0; i < 2; ++i) {
    h.Connect("worker-0");
    const auto* refused = h.member("worker-0").Last(Kind::kRefused);
    ASSERT_NE(refused, nullptr);
    EXPECT_TRUE(refused->refused().fenced());
    EXPECT_THAT(refused->refused().reason(), HasSubstr("nothing was heard of it for 10.0 s"));
    EXPECT_TRUE(h.IsClosed(h.member("worker-0").session));
    h.member("worker-0").inbox.clear();
    h.Restart();
  }
  h.Join("worker-0");  // a new incarnation
  EXPECT_NE(h.member("worker-0").Last(Kind::kWelcome), nullptr);
}

TEST(Membership, TheCoordinatorsOwnStallCountsAgainstNobody) {
  Harness h;
  h.Join("worker-0");
  h.Stall(absl::Minutes(5));
  h.Step(Tick{});
  EXPECT_EQ(StateOf(h, "worker-0"), "idle");
  h.Beat("worker-0");
  h.AdvanceBeating(absl::Seconds(20), {"worker-0"});
  EXPECT_EQ(StateOf(h, "worker-0"), "idle");
  h.Advance(absl::Seconds(11));
  EXPECT_EQ(StateOf(h, "worker-0"), "lost");
}

TEST(Membership, ASecondProcessOfALiveNameIsRefusedReadably) {
  Harness h;
  const FakeMember first = h.Join("worker-0", "host-a");
  h.Join("worker-0", "host-b");
  const auto* refused = h.member("worker-0").Last(Kind::kRefused);
  ASSERT_NE(refused, nullptr);
  EXPECT_FALSE(refused->refused().fenced());
  EXPECT_THAT(refused->refused().reason(),
              HasSubstr(absl::StrCat("the name worker-0 is taken by pid ", first.hello.pid(),
                                     " on host host-a")));
  EXPECT_THAT(refused->refused().reason(), HasSubstr("another name"));
  EXPECT_FALSE(h.IsClosed(first.session));
}

TEST(Membership, ARestartedProcessOnTheSameHostReplacesABrokenOneAtOnce) {
  Harness h;
  const FakeMember first = h.Join("worker-0");
  h.Disconnect("worker-0");
  h.Join("worker-0");
  EXPECT_NE(h.member("worker-0").Last(Kind::kWelcome), nullptr);
  // The old process is fenced: it cannot come back beside the new one.
  h.member("worker-0") = first;
  h.Connect("worker-0");
  ASSERT_NE(h.member("worker-0").Last(Kind::kRefused), nullptr);
  EXPECT_TRUE(h.member("worker-0").Last(Kind::kRefused)->refused().fenced());
}

TEST(Membership, OnAnotherHostTheNameIsFreeOnlyAfterTheTimeout) {
  Harness h;
  h.Join("worker-0", "host-a");
  h.Disconnect("worker-0");
  h.Join("worker-0", "host-b");
  ASSERT_NE(h.member("worker-0").Last(Kind::kRefused), nullptr);
  EXPECT_THAT(h.member("worker-0").Last(Kind::kRefused)->refused().reason(),
              HasSubstr("the name is free in 10.0 s"));
  h.Advance(absl::Seconds(10));
  h.Join("worker-0", "host-b");
  EXPECT_NE(h.member("worker-0").Last(Kind::kWelcome), nullptr);
}

TEST(Membership, TheSameIncarnationMayComeBackOnANewStream) {
  Harness h;
  const SessionId old = h.Join("worker-0").session;
  h.Connect("worker-0");
  EXPECT_TRUE(h.IsClosed(old));
  h.Step(SessionClosed{old});  // arrives late and must not disconnect the new stream
  h.AdvanceBeating(absl::Seconds(20), {"worker-0"});
  EXPECT_EQ(StateOf(h, "worker-0"), "idle");
}

TEST(Membership, MalformedHellosAreRefusedWithTheReason) {
  Harness h;
  const auto refuse = [&](auto change, const std::string& why) {
    h.Join("worker-0");
    FakeMember& member = h.member("worker-0");
    member = FakeMember();
    member.hello.set_kind(v1::MEMBER_KIND_WORKER);
    member.hello.set_name("worker-1");
    member.hello.set_incarnation(std::string(32, 'a'));
    change(member.hello);
    h.Connect("worker-0");
    ASSERT_NE(member.Last(Kind::kRefused), nullptr) << why;
    EXPECT_THAT(member.Last(Kind::kRefused)->refused().reason(), HasSubstr(why));
  };
  refuse([](v1::Hello& hello) { hello.clear_kind(); }, "the member kind 0 is neither worker (1)");
  refuse([](v1::Hello& hello) { hello.set_name("../../etc"); }, "\"../../etc\" is not");
  refuse([](v1::Hello& hello) { hello.set_name(""); }, "member name");
  refuse([](v1::Hello& hello) { hello.set_incarnation("zz"); }, "32 hex digits");
  refuse([](v1::Hello& hello) { hello.set_kind(static_cast<v1::MemberKind>(9)); },
         "the member kind 9 is neither worker (1) nor store (2)");
  refuse([](v1::Hello& hello) { hello.set_name(std::string(64, 'x')); }, "1 to 63 letters");
  refuse([](v1::Hello& hello) { hello.set_name("a\033[2J"); }, "\"a\\x1b[2J\" is not");
}

// They are told to whoever asks: terminals, logs, pages.
TEST(Membership, TextsOfAHelloArePrintableAndShort) {
  using Set = void (*)(v1::Hello&, const std::string&);
  const std::pair<const char*, Set> texts[] = {
      {"host", [](v1::Hello& hello, const std::string& text) { hello.set_host(text); }},
      {"address", [](v1::Hello& hello, const std::string& text) { hello.set_address(text); }},
      {"version", [](v1::Hello& hello, const std::string& text) { hello.set_version(text); }},
      {"device", [](v1::Hello& hello, const std::string& text) { hello.set_device(text); }},
      {"fingerprint",
       [](v1::Hello& hello, const std::string& text) { hello.set_fingerprint(text); }},
      {"metrics address",
       [](v1::Hello& hello, const std::string& text) { hello.set_metrics_address(text); }}};
  for (const auto& [what, set] : texts) {
    Harness h;
    const auto say = [&](const std::string& text) {
      FakeMember& member = h.Join("worker-0");
      h.Step(SessionClosed{member.session});
      member = FakeMember();
      member.hello.set_kind(v1::MEMBER_KIND_WORKER);
      member.hello.set_name("worker-1");
      member.hello.set_incarnation(std::string(32, 'a'));
      set(member.hello, text);
      h.Connect("worker-0");
      const auto* refused = member.Last(Kind::kRefused);
      return refused == nullptr ? "" : refused->refused().reason();
    };
    const std::string of = absl::StrCat("the ", what, " of the Hello");
    for (const char* odd : {"\033", "\n", "\x7f", "\xc2\x9b", "\xe2\x80\xae", "\xff"}) {
      const std::string why = say(absl::StrCat("gpu-7", odd));
      EXPECT_THAT(why, ::testing::StartsWith(of));
      EXPECT_THAT(why, HasSubstr(absl::StrFormat("has the byte 0x%02x at 5; wanted printable ASCII",
                                                 static_cast<unsigned char>(odd[0]))));
      EXPECT_EQ(why.find(odd), std::string::npos);
    }
    EXPECT_THAT(say(std::string("a\0b", 3)), HasSubstr("has the byte 0x00 at 1"));
    const std::string longer = say(std::string(257, 'x'));
    EXPECT_THAT(longer, ::testing::StartsWith(of));
    EXPECT_THAT(longer, HasSubstr("has 257 bytes, wanted at most 256"));
    EXPECT_LT(longer.size(), 200u);
    EXPECT_EQ(say(std::string(256, 'x')), "");
  }
}

// A half of a character would make the whole log unreadable over gRPC, whose texts are UTF-8.
TEST(Membership, ALongLogLineIsCutBetweenTwoCharacters) {
  Harness h;
  h.JoinMany(1);
  h.SubmitJob(Harness::Spec("a", 1));
  ASSERT_TRUE(h.member("worker-0").assign.has_value());
  std::string line = "x";  // so that 8192 bytes end within a character
  while (line.size() < 9000) line += "\xc3\xa9";
  MemberSaid said{h.member("worker-0").session, {}};
  v1::LogLines& log = *said.message.mutable_log();
  *log.mutable_running() = h.member("worker-0").Fence();
  log.add_lines(line);
  log.add_lines("short");
  const Decision decision = h.Step(said);
  const AppendLog* appended = nullptr;
  for (const Action& action : decision.actions) {
    if (const auto* found = std::get_if<AppendLog>(&action)) appended = found;
  }
  ASSERT_NE(appended, nullptr);
  ASSERT_EQ(appended->lines.size(), 2u);
  // 8189 bytes beside the dots: the x and 4094 characters of two.
  EXPECT_EQ(appended->lines[0], line.substr(0, 8189) + "...");
  EXPECT_EQ(appended->lines[1], "short");
}

TEST(Membership, AMemberThatSaysGoodbyeLeavesItsNameFree) {
  Harness h;
  const SessionId session = h.Join("worker-0").session;
  MemberSaid said{session, {}};
  said.message.mutable_goodbye()->set_reason("SIGTERM");
  h.Step(said);
  EXPECT_EQ(StateOf(h, "worker-0"), "absent");
  EXPECT_TRUE(h.IsClosed(session));
}

TEST(Membership, MessagesOfAnUnknownStreamChangeNothing) {
  Harness h;
  MemberSaid said{4711, {}};
  said.message.mutable_heartbeat()->set_sequence(1);
  EXPECT_TRUE(h.Step(said).actions.empty());
  EXPECT_TRUE(h.Step(SessionClosed{4711}).actions.empty());
}

TEST(Membership, NamesAreInNaturalOrder) {
  NaturalLess less;
  EXPECT_TRUE(less("worker-2", "worker-10"));
  EXPECT_FALSE(less("worker-10", "worker-2"));
  EXPECT_TRUE(less("worker-9", "worker-09a"));
  EXPECT_TRUE(less("a", "a1"));
  EXPECT_FALSE(less("a1", "a"));
  EXPECT_NE(less("a01", "a1"), less("a1", "a01"));
  EXPECT_FALSE(less("a1", "a1"));
}

}  // namespace
}  // namespace zeroshard::coordinator
