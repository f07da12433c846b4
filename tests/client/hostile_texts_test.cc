// Members, jobs and a coordinator whose words would command the terminal: they are shown and do
// nothing; programs get them as they are.
#include <string>
#include <vector>

#include "common/exit_codes.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/command_fixture.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Json = nlohmann::json;

// Clears the screen, sets the title, colours by a C1 control, turns the line, and adds one.
const char kHostile[] =
    "x\033[2J\033]0;owned\a\xc2\x9b"
    "31m\xe2\x80\xae txt.b\r\nzeroshard: all is well\x7f";
const char kVisible[] =
    "x\\x1b[2J\\x1b]0;owned\\x07\\u009b31m\\u202e txt.b\\r\\nzeroshard: all is well\\x7f";

class HostileTextsTest : public CommandTest {
 protected:
  HostileTextsTest() {
    v1::JobStatus job = Job(kHostile, v1::JOB_STATE_FAILED, kHostile);
    job.set_weights_digest(kHostile);
    job.set_directory(kHostile);
    job.mutable_resume()->set_checkpoint(kHostile);
    job.mutable_checkpoint()->set_path(kHostile);
    v1::RankStatus& rank = *job.add_ranks();
    rank.set_member(kHostile);
    rank.set_host(kHostile);
    rank.mutable_progress()->set_phase(kHostile);
    v1::StoreStatus& store = *job.add_stores();
    store.set_member(kHostile);
    store.set_host(kHostile);
    store.set_problem(kHostile);
    v1::JobEvent& event = *job.add_events();
    event.set_unix_ms(1);
    event.set_state(v1::JOB_STATE_FAILED);
    event.set_reason(kHostile);
    fake_.jobs = {job};
    job_status_ = job;
  }

  // Nothing but lines of text, and of tabs where `tabs`.
  static void ExpectHarmless(const std::string& text, bool tabs = false) {
    for (size_t i = 0; i < text.size(); ++i) {
      const auto c = static_cast<unsigned char>(text[i]);
      if (c == '\n' || (tabs && c == '\t')) continue;
      ASSERT_TRUE(c >= 0x20 && c != 0x7f) << static_cast<int>(c) << " at " << i << " of " << text;
      const unsigned char next = i + 1 < text.size() ? text[i + 1] : 0;
      ASSERT_FALSE(c == 0xc2 && next < 0xa0) << "C1 at " << i << " of " << text;
    }
    EXPECT_THAT(text, Not(HasSubstr("\xe2\x80\xae")));
    EXPECT_THAT(text, Not(HasSubstr("\nzeroshard: all is well")));
  }
  static int Lines(const std::string& text) {
    return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
  }
  // ASCII, an object a line.
  static Json Parsed(const std::string& text) {
    for (const char c : text) EXPECT_TRUE(c == '\n' || (c >= 0x20 && c < 0x7f)) << text;
    EXPECT_EQ(Lines(text), 1) << text;
    return Json::parse(text);
  }

  v1::JobStatus job_status_;
};

TEST_F(HostileTextsTest, OfAMembersHelloAreShownByNodes) {
  v1::Node node;
  v1::Hello& hello = *node.mutable_hello();
  hello.set_name(kHostile);
  hello.set_host(kHostile);
  hello.set_device(kHostile);
  hello.set_metrics_address(kHostile);
  node.set_state(kHostile);
  node.set_job(kHostile);
  fake_.nodes = {node};
  const Outcome text = Run({"nodes"});
  ExpectHarmless(text.out);
  EXPECT_EQ(Lines(text.out), 2);
  EXPECT_THAT(text.out, HasSubstr(kVisible));
  const Json json = Parsed(Run({"nodes", "--output", "json"}).out);
  EXPECT_EQ(json["nodes"][0]["hello"]["host"], kHostile);
  EXPECT_EQ(json["nodes"][0]["job"], kHostile);
}

TEST_F(HostileTextsTest, OfAJobAreShownByListAndStatus) {
  const Outcome list = Run({"list"});
  ExpectHarmless(list.out);
  EXPECT_EQ(Lines(list.out), 2);
  EXPECT_THAT(list.out, HasSubstr(kVisible));
  const Outcome status = Run({"status", kHostile});
  ASSERT_EQ(status.code, kExitOk) << status.err;
  ExpectHarmless(status.out);
  EXPECT_THAT(status.out, AllOf(HasSubstr(std::string("FAILED: ") + kVisible),
                                HasSubstr(std::string("directory     ") + kVisible)));
  const Json json = Parsed(Run({"status", kHostile, "--output", "json"}).out);
  EXPECT_EQ(json["reason"], kHostile);
  EXPECT_EQ(json["ranks"][0]["host"], kHostile);
  EXPECT_EQ(json["events"][0]["reason"], kHostile);
  EXPECT_EQ(Parsed(Run({"list", "--output", "json"}).out)["jobs"][0]["name"], kHostile);
}

TEST_F(HostileTextsTest, OfAReasonAreShownByWatchAndByTheLastWord) {
  v1::WatchUpdate first, last;
  *first.mutable_status() = job_status_;
  first.mutable_status()->set_state(v1::JOB_STATE_RUNNING);
  *last.mutable_status() = job_status_;
  v1::JobEvent& event = *last.mutable_status()->add_events();
  event.set_unix_ms(2);
  event.set_state(v1::JOB_STATE_FAILED);
  event.set_reason(std::string("checkpoint ") + kHostile);
  *last.add_records() = Step(1, 5);
  v1::SampleRecord& sample = *last.add_samples();
  sample.set_prompt(kHostile);
  sample.set_text(kHostile);
  const auto watched = [&] {
    fake_.watches = {{{first}, {grpc::StatusCode::UNAVAILABLE, kHostile}},
                     {{last}, grpc::Status::OK}};
  };
  watched();
  const Outcome text = Run({"watch", kHostile});
  EXPECT_EQ(text.code, kExitFailed);
  ExpectHarmless(text.out);
  EXPECT_THAT(text.out, AllOf(HasSubstr(std::string("RUNNING: ") + kVisible),
                              HasSubstr(std::string("checkpoint ") + kVisible),
                              HasSubstr(std::string(kVisible) + kVisible),
                              HasSubstr("the coordinator is away")));
  ExpectHarmless(text.err);
  ExpectOneMessage(text);
  EXPECT_THAT(text.err, HasSubstr(std::string("FAILED: ") + kVisible));

  watched();
  const Outcome json = Run({"watch", kHostile, "--output", "json"});
  ExpectHarmless(json.err);
  const std::string line = json.out.substr(json.out.find('\n') + 1);
  EXPECT_EQ(Parsed(line)["status"]["reason"], kHostile);
  EXPECT_EQ(Parsed(line)["samples"][0]["text"], kHostile);
}

TEST_F(HostileTextsTest, OfALogLineAreShownAndItsTabsStay) {
  v1::LogChunk chunk;
  chunk.set_text(std::string(kHostile) + "\n\tat main\n");
  fake_.logs = {chunk};
  const Outcome text = Run({"logs", kHostile});
  ExpectHarmless(text.out, /*tabs=*/true);
  EXPECT_THAT(text.out, HasSubstr("rank 0: x\\x1b[2J\\x1b]0;owned\\x07\\u009b31m"));
  EXPECT_THAT(text.out, HasSubstr("\nrank 0: zeroshard: all is well\\x7f\nrank 0: \tat main\n"));
  // Without the rank before it a line is still one line.
  EXPECT_EQ(Lines(Run({"logs", kHostile, "--rank", "0"}).out), 3);
  EXPECT_EQ(Parsed(Run({"logs", kHostile, "--output", "json"}).out)["text"], chunk.text());
}

TEST_F(HostileTextsTest, OfAnErrorAreShown) {
  fake_.submit_error = {grpc::StatusCode::RESOURCE_EXHAUSTED, kHostile};
  const Outcome refused = Run({"submit", job_});
  EXPECT_EQ(refused.code, kExitDoesNotFit);
  // A message may have lines of its own.
  EXPECT_EQ(refused.err,
            "zeroshard: x\\x1b[2J\\x1b]0;owned\\x07\\u009b31m\\u202e txt.b\\r\n"
            "zeroshard: all is well\\x7f\n");
  // What the user typed comes back in errors, too.
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"status", "no\033[2Jne"}, {"\033[2J"}, {"list", "--\033[2J"}}) {
    const Outcome outcome = Run(args);
    EXPECT_NE(outcome.code, kExitOk);
    ExpectHarmless(outcome.err);
    EXPECT_THAT(outcome.err, HasSubstr("\\x1b[2J"));
  }
}

TEST_F(HostileTextsTest, OfWhatSubmitCancelCheckpointsAndVersionAnswerAreShown) {
  const Outcome cancelled = Run({"cancel", kHostile});
  ExpectHarmless(cancelled.out);
  EXPECT_EQ(Lines(cancelled.out), 1);
  EXPECT_THAT(cancelled.out, HasSubstr(std::string("CANCELLED: ") + kVisible));

  fake_.checkpoints.set_dir(kHostile);
  ExpectHarmless(Run({"checkpoints", kHostile}).out);
  v1::CheckpointEntry& entry = *fake_.checkpoints.add_checkpoints();
  entry.set_problem(kHostile);
  const Outcome checkpoints = Run({"checkpoints", kHostile});
  ExpectHarmless(checkpoints.out);
  EXPECT_EQ(Lines(checkpoints.out), 3);
  EXPECT_THAT(checkpoints.out, HasSubstr(kVisible));

  fake_.version = kHostile;
  const Outcome version = Run({"version"});
  ExpectHarmless(version.out);
  EXPECT_THAT(version.out, HasSubstr(kVisible));

  fake_.queued_reason = kHostile;
  const Outcome submitted = Run({"submit", job_});
  ExpectHarmless(submitted.out);
  EXPECT_THAT(submitted.out, HasSubstr(std::string("QUEUED: ") + kVisible));
}

TEST_F(HostileTextsTest, OfAnyLengthLeaveTheOtherColumnsToBeRead) {
  v1::Node node;
  node.mutable_hello()->set_name("worker-0");
  node.mutable_hello()->set_host(std::string(100'000, 'h'));
  node.mutable_hello()->set_metrics_address("host:1");
  fake_.nodes = {node};
  const std::string nodes = Run({"nodes"}).out;
  EXPECT_LT(nodes.size(), 1500u);
  EXPECT_THAT(nodes, HasSubstr("hhh...  "));
  fake_.jobs[0].set_reason(std::string(100'000, 'r'));
  const std::string list = Run({"list"}).out;
  EXPECT_LT(list.size(), 5000u);
  EXPECT_THAT(list, HasSubstr("rrr...\n"));
  const std::string json = Run({"list", "--output", "json"}).out;
  EXPECT_EQ(Json::parse(json)["jobs"][0]["reason"].get<std::string>().size(), 100'000u);
}

TEST_F(HostileTextsTest, CharactersOfSeveralBytesKeepTheColumnsStraight) {
  fake_.jobs = {Job("\xc3\xa9\xc3\xa9", v1::JOB_STATE_QUEUED, "a"),
                Job("ee", v1::JOB_STATE_QUEUED, "b")};
  EXPECT_EQ(Run({"list"}).out,
            "NAME  RUN   STATE   STEP  LOSS  REASON\n"
            "\xc3\xa9\xc3\xa9    \xc3\xa9\xc3\xa9-1  QUEUED  0/2   -     a\n"
            "ee    ee-1  QUEUED  0/2   -     b\n");
}

}  // namespace
}  // namespace zeroshard
