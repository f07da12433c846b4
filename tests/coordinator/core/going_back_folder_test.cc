// The folder of checkpoints where a job goes back: processes that still hold it, and a disk that
// does not answer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/going_back.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(GoingBack, AProcessThatStillHoldsTheFolderIsWaitedFor) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  Replace(h);
  for (const std::string& name : kBoth) h.Work(name, 0, "loading");
  for (const std::string& name : kBoth) {
    h.End(name, "FAILED_PRECONDITION",
          "checkpoint.dir /ckpt: job a (run a-1, process 7 on host host-a) writes there; wait", 0);
  }
  LetGo(h, kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING) << h.Status("a").reason();
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("waits for a process that was given up"));
  EXPECT_EQ(h.Status("a").generation(), 2);
  h.disk().clear();
  h.WriteCheckpoint("a-1", 7);  // it woke
  h.AdvanceBeating(absl::Seconds(11), kBoth);
  EXPECT_EQ(h.Status("a").generation(), 3);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 8);
}

// Each rank finds the folder locked by the process that was given up.
void FindFolderHeld(Harness& h) {
  for (const std::string& name : kBoth) h.Work(name, 0, "loading");
  for (const std::string& name : kBoth) {
    h.End(name, "FAILED_PRECONDITION",
          "checkpoint.dir /ckpt: job a (run a-1, process 7 on host host-a) writes there; wait", 0);
  }
  LetGo(h, kBoth);
}

void AwaitGeneration(Harness& h, uint64_t generation) {
  for (int i = 0; i < 65 && h.Status("a").generation() < generation; ++i) {
    h.AdvanceBeating(absl::Seconds(1), kBoth);
  }
  ASSERT_EQ(h.Status("a").generation(), generation) << h.Status("a").reason();
}

TEST(GoingBack, WaitingForTheFolderIsNoRecoveryThatLedNowhere) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  Replace(h);
  for (uint64_t generation = 2; generation <= 9; ++generation) {
    ASSERT_NO_FATAL_FAILURE(AwaitGeneration(h, generation));
    FindFolderHeld(h);
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING) << h.Status("a").reason();
    EXPECT_THAT(h.Status("a").reason(),
                AllOf(HasSubstr("kill it"), HasSubstr("process 7 on host host-a")));
  }
  ASSERT_NO_FATAL_FAILURE(AwaitGeneration(h, 10));  // it was killed
  Begin(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.Steps("worker-0", 6, 9);
  EXPECT_EQ(h.History("a-1"), UpTo(9));
}

TEST(GoingBack, AFolderThatIsNeverLeftEndsTheJobAndSaysWhichProcessToKill) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  Replace(h);
  const absl::Duration begun = h.now();
  for (uint64_t generation = 2;; ++generation) {
    ASSERT_LT(generation, 20);
    ASSERT_NO_FATAL_FAILURE(AwaitGeneration(h, generation));
    FindFolderHeld(h);
    if (h.Status("a").state() != v1::JOB_STATE_RECOVERING) break;
  }
  EXPECT_GE(h.now() - begun, absl::Minutes(10));
  EXPECT_LE(h.now() - begun, absl::Minutes(12));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("kill that process"), HasSubstr("process 7 on host host-a"),
                    HasSubstr("--resume-from /ckpt/step-5")));
}

TEST(GoingBack, AnotherJobsFolderIsNotWaitedFor) {
  Harness h;
  Start(h, 8);
  Replace(h);
  for (const std::string& name : kBoth) h.Work(name, 0, "loading");
  for (const std::string& name : kBoth) {
    h.End(name, "FAILED_PRECONDITION",
          "checkpoint.dir /ckpt: job b (run b-1, process 7 on host host-a) writes there; wait", 0);
  }
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
}

TEST(GoingBack, AFolderThatCannotBeReadIsTriedAgainAndThenGivenUp) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.BreakDisk(absl::DeadlineExceededError("/ckpt does not answer"));
  Replace(h);
  h.AdvanceBeating(absl::Seconds(30), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("looks for its newest complete checkpoint"));
  h.BreakDisk(absl::OkStatus());
  h.AdvanceBeating(absl::Seconds(2), kBoth);
  ASSERT_EQ(h.member("worker-1").assign->first_step(), 6);
  Begin(h);
  h.Steps("worker-0", 6, 9);
  h.BreakDisk(absl::DeadlineExceededError("/ckpt does not answer"));
  Replace(h);
  h.AdvanceBeating(absl::Seconds(63), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("/ckpt does not answer"), HasSubstr("timeouts.start_seconds")));
}

}  // namespace
}  // namespace zeroshard::coordinator
