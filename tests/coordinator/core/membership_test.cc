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
  refuse([](v1::Hello& hello) { hello.clear_kind(); }, "neither worker nor store");
  refuse([](v1::Hello& hello) { hello.set_name("../../etc"); }, "\"../../etc\" is not");
  refuse([](v1::Hello& hello) { hello.set_name(""); }, "member name");
  refuse([](v1::Hello& hello) { hello.set_incarnation("zz"); }, "32 hex digits");
  refuse([](v1::Hello& hello) { hello.set_host(std::string(300, 'x')); }, "256 bytes");
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
