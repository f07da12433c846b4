// Who has to wait for whom: a job that needs more workers than there are holds up nobody, and is
// first once there are enough.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::HasSubstr;

// Those that were there before the coordinator started are back, or are not.
constexpr absl::Duration kBack = absl::Seconds(21);

TEST(Queue, AJobThatNeedsMoreWorkersThanThereAreHoldsUpNobody) {
  Harness h;
  h.JoinMany(2);
  h.AdvanceBeating(kBack, {"worker-0", "worker-1"});
  h.SubmitJob(Harness::Spec("big", 3));
  h.SubmitJob(Harness::Spec("b", 1));
  h.SubmitJob(Harness::Spec("c", 1));
  EXPECT_EQ(h.Status("big").state(), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(h.Status("big").reason(), HasSubstr("needs 3 workers, "));
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(h.Status("c").state(), v1::JOB_STATE_PLACING);
}

TEST(Queue, ItIsFirstOnceThereAreEnoughHoweverManyOthersCome) {
  Harness h;
  h.JoinMany(2);
  h.AdvanceBeating(kBack, {"worker-0", "worker-1"});
  h.SubmitJob(Harness::Spec("big", 3));
  h.StartJob(Harness::Spec("b", 1, 1), {"worker-0"});
  h.StartJob(Harness::Spec("c", 1, 1), {"worker-1"});
  h.Join("worker-2");
  h.SubmitJob(Harness::Spec("d", 1));
  EXPECT_EQ(h.Status("d").reason(), "behind big-1 in the queue");
  for (const auto& [worker, job] : {std::pair{"worker-0", "b"}, std::pair{"worker-1", "c"}}) {
    h.Steps(worker, 1, 1);
    h.End(worker);
    h.Idle(worker);
    ASSERT_EQ(h.Status(job).state(), v1::JOB_STATE_COMPLETED);
  }
  EXPECT_EQ(h.Status("big").state(), v1::JOB_STATE_PLACING) << h.Status("big").reason();
  EXPECT_EQ(h.Status("d").state(), v1::JOB_STATE_QUEUED);
}

TEST(Queue, AWorkerThatDiedIsCountedForAsLongAsItTakesToStartItAgain) {
  Harness h;
  h.JoinMany(2);
  h.AdvanceBeating(kBack, {"worker-0", "worker-1"});
  h.Exit("worker-1", 0, 9);
  h.Forget("worker-1");
  h.SubmitJob(Harness::Spec("big", 2));
  h.SubmitJob(Harness::Spec("small", 1));
  EXPECT_EQ(h.Status("small").reason(), "behind big-1 in the queue");
  h.AdvanceBeating(absl::Seconds(19), {"worker-0"});
  EXPECT_EQ(h.Status("small").state(), v1::JOB_STATE_QUEUED);
  h.AdvanceBeating(absl::Seconds(2), {"worker-0"});
  EXPECT_EQ(h.Status("small").state(), v1::JOB_STATE_PLACING) << h.Status("small").reason();
}

TEST(Queue, NobodyOvertakesWhileMembersComeBackToACoordinator) {
  Harness h;
  h.JoinMany(2);
  h.Restart();
  h.SubmitJob(Harness::Spec("big", 2));
  h.SubmitJob(Harness::Spec("small", 1));
  h.Connect("worker-0");
  EXPECT_EQ(h.Status("small").state(), v1::JOB_STATE_QUEUED);
  h.Connect("worker-1");
  EXPECT_EQ(h.Status("big").state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(h.Status("small").state(), v1::JOB_STATE_QUEUED);
}

TEST(Queue, WorkersThatComputeAnotherWayAreNotCountedForADeterministicJob) {
  Harness h;
  h.JoinMany(1);
  FakeMember& other = h.Join("worker-1");
  h.Disconnect("worker-1");
  other.hello.set_fingerprint("avx512");
  other.hello.set_incarnation(std::string(32, 'b'));
  h.Connect("worker-1");
  h.AdvanceBeating(absl::Seconds(41), {"worker-0", "worker-1"});
  v1::JobSpec spec = Harness::Spec("same", 2);
  spec.set_deterministic(true);
  h.SubmitJob(spec);
  h.SubmitJob(Harness::Spec("any", 2));
  EXPECT_EQ(h.Status("same").state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(h.Status("any").state(), v1::JOB_STATE_PLACING) << h.Status("any").reason();
}

// It lost a worker for good, and nothing else waits for it then.
TEST(Queue, ARecoveringJobHoldsUpNobodyWhenItsWorkerDoesNotComeBack) {
  Harness h;
  h.JoinMany(2);
  h.AdvanceBeating(kBack, {"worker-0", "worker-1"});
  h.StartJob(Harness::SavingSpec("a", 2), {"worker-0", "worker-1"});
  h.SubmitJob(Harness::Spec("b", 1));
  h.Exit("worker-1", 0, 9);
  h.Idle("worker-0");
  h.Forget("worker-1");
  h.AdvanceBeating(absl::Seconds(15), {"worker-0"});
  EXPECT_EQ(h.Status("b").reason(), "behind a-1 in the queue");
  h.AdvanceBeating(absl::Seconds(6), {"worker-0"});
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_PLACING) << h.Status("b").reason();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
}

}  // namespace
}  // namespace zeroshard::coordinator
