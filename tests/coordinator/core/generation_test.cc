#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> Names(int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(absl::StrCat("worker-", i));
  return names;
}

TEST(Keys, AGetWaitsForThePutOfAnyRank) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), Names(2));
  const RequestId get = h.Get("worker-1", "gloo/0");
  EXPECT_FALSE(h.Answered(get));
  EXPECT_TRUE(h.Answer(h.Put("worker-0", "gloo/0", "10.0.0.1:99")).status.ok());
  ASSERT_TRUE(h.Answered(get));
  EXPECT_EQ(h.Answer(get).text, "10.0.0.1:99");
  EXPECT_EQ(h.Answer(h.Get("worker-1", "gloo/0")).text, "10.0.0.1:99");
}

TEST(Keys, APutOverwritesNothingButMayBeSaidAgain) {
  Harness h;
  h.JoinMany(1);
  h.StartJob(Harness::Spec("a", 1), Names(1));
  h.Put("worker-0", "k", "1");
  EXPECT_TRUE(h.Answer(h.Put("worker-0", "k", "1")).status.ok());
  EXPECT_EQ(h.Answer(h.Put("worker-0", "k", "2")).status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(h.Answer(h.Get("worker-0", "k")).text, "1");
}

TEST(Keys, AGetEndsAtItsDeadline) {
  Harness h;
  h.JoinMany(1);
  h.StartJob(Harness::Spec("a", 1), Names(1));
  const RequestId get = h.Get("worker-0", "never", absl::Seconds(5));
  h.AdvanceBeating(absl::Milliseconds(4500), Names(1));
  EXPECT_FALSE(h.Answered(get));
  h.AdvanceBeating(absl::Milliseconds(500), Names(1));
  ASSERT_TRUE(h.Answered(get));
  EXPECT_EQ(h.Answer(get).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(h.Answer(get).status.message()), HasSubstr("\"never\""));
}

TEST(Keys, ACallerThatLeftIsNotAnswered) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), Names(2));
  const RequestId get = h.Get("worker-1", "k");
  h.Step(RequestDropped{get});
  h.Put("worker-0", "k", "v");
  EXPECT_FALSE(h.Answered(get));
}

TEST(Keys, NumberSizeAndWaitersAreBounded) {
  CoreOptions options;
  options.max_keys_per_rank = 2;
  options.max_value_bytes = 8;
  options.max_waiting_per_rank = 3;
  Harness h(options);
  h.JoinMany(1);
  h.StartJob(Harness::Spec("a", 1), Names(1));
  EXPECT_EQ(h.Answer(h.Put("worker-0", "", "v")).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(h.Answer(h.Put("worker-0", "k", "123456789")).status.code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(h.Answer(h.Put("worker-0", std::string(257, 'k'), "v")).status.code(),
            absl::StatusCode::kInvalidArgument);
  h.Put("worker-0", "1", "v");
  h.Put("worker-0", "2", "v");
  EXPECT_EQ(h.Answer(h.Put("worker-0", "3", "v")).status.code(),
            absl::StatusCode::kResourceExhausted);
  for (int i = 0; i < 3; ++i) h.Get("worker-0", "never");
  EXPECT_EQ(h.Answer(h.Get("worker-0", "never")).status.code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(Keys, AreGoneInTheNextRunOfTheName) {
  Harness h;
  h.JoinMany(1);
  h.StartJob(Harness::Spec("a", 1), Names(1));
  h.Put("worker-0", "k", "old");
  h.CancelJob("a");
  h.Idle("worker-0");
  h.StartJob(Harness::Spec("a", 1), Names(1));
  EXPECT_FALSE(h.Answered(h.Get("worker-0", "k")));
  EXPECT_TRUE(h.Answer(h.Put("worker-0", "k", "new")).status.ok());
}

TEST(Barrier, ReleasesEveryRankWhenTheLastArrivesAndIsMeasured) {
  Harness h;
  h.JoinMany(3);
  h.StartJob(Harness::Spec("a", 3), Names(3));
  const RequestId first = h.Arrive("worker-0", "save");
  h.AdvanceBeating(absl::Seconds(2), Names(3));
  const RequestId second = h.Arrive("worker-1", "save");
  EXPECT_FALSE(h.Answered(first));
  const RequestId third = h.Arrive("worker-2", "save");
  for (const RequestId id : {first, second, third}) EXPECT_TRUE(h.Answer(id).status.ok());
  const Measure& measure = h.measures().back();
  EXPECT_EQ(measure.kind, MetricKind::kBarrierSeconds);
  EXPECT_DOUBLE_EQ(measure.value, 2.0);
}

TEST(Barrier, ARetriedArrivalIsTheSameArrival) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), Names(2));
  const RequestId first = h.Arrive("worker-0", "save");
  const RequestId again = h.Arrive("worker-0", "save");
  EXPECT_FALSE(h.Answered(again));
  h.Arrive("worker-1", "save");
  EXPECT_TRUE(h.Answer(first).status.ok());
  EXPECT_TRUE(h.Answer(again).status.ok());
  EXPECT_TRUE(h.Answer(h.Arrive("worker-0", "save")).status.ok());  // long complete
}

TEST(Barrier, AtItsDeadlineNamesAtMostThreeMissingRanksAndTheirProgress) {
  Harness h;
  h.JoinMany(6);
  h.StartJob(Harness::Spec("a", 6), Names(6));
  for (int i = 1; i < 6; ++i) h.Work(absl::StrCat("worker-", i), 7, "backward");
  const RequestId id = h.Arrive("worker-0", "save", absl::Seconds(3));
  h.AdvanceBeating(absl::Seconds(3), Names(6));
  ASSERT_TRUE(h.Answered(id));
  EXPECT_EQ(h.Answer(id).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(
      std::string(h.Answer(id).status.message()),
      AllOf(HasSubstr("barrier \"save\" of a-1 generation 1: 5 of 6 ranks"),
            HasSubstr("rank 1 (worker-1 on host-a): step 7, backward"), HasSubstr("rank 2 ("),
            HasSubstr("rank 3 ("), HasSubstr("and 2 more"), Not(HasSubstr("rank 4 ("))));
}

TEST(Barrier, RanksThatDoNotStartInTimeFailTheJobByName) {
  Harness h;
  h.JoinMany(3);
  h.SubmitJob(Harness::Spec("a", 3));
  for (const std::string& name : Names(3)) h.Work(name, 0, "loading");
  h.Arrive("worker-0", "start", absl::Seconds(100));
  h.AdvanceBeating(absl::Seconds(60), Names(3));
  const v1::JobStatus status = h.Status("a");
  EXPECT_EQ(status.state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(status.reason(),
              AllOf(HasSubstr("2 of 3 ranks had not started"), HasSubstr("rank 1 (worker-1"),
                    HasSubstr("rank 2 (worker-2"), HasSubstr("loading"), Not(HasSubstr("rank 0"))));
  EXPECT_THAT(h.member("worker-1").StopReason(), HasSubstr("had not started"));
}

TEST(Barrier, RanksThatStillLoadAreToldWhatHelps) {
  const auto reason = [](const std::string& tokenizer, const std::string& phase) {
    Harness h;
    h.JoinMany(1);
    v1::JobSpec spec = Harness::Spec("a", 1);
    spec.mutable_data()->set_tokenizer(tokenizer);
    h.SubmitJob(spec);
    h.Work("worker-0", 0, phase);
    h.AdvanceBeating(absl::Seconds(60), Names(1));
    return h.Status("a").reason();
  };
  EXPECT_THAT(reason("/models/tokenizer.json", "loading"),
              AllOf(HasSubstr("timeouts.start_seconds (60"),
                    HasSubstr("raise timeouts.start_seconds, or turn the text into tokens once "
                              "with `zeroshard tokenize`")));
  EXPECT_THAT(reason("tokens", "loading"),
              AllOf(HasSubstr("raise timeouts.start_seconds"), Not(HasSubstr("tokenize"))));
  EXPECT_THAT(reason("bytes", "waiting"),
              AllOf(HasSubstr("had not started"), Not(HasSubstr("raise"))));
}

TEST(Barrier, OfAFailedGenerationIsAborted) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), Names(2));
  const RequestId id = h.Arrive("worker-0", "save", absl::Seconds(100));
  h.Exit("worker-1", 0, 9);
  ASSERT_TRUE(h.Answered(id));
  EXPECT_EQ(h.Answer(id).status.code(), absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace zeroshard::coordinator
