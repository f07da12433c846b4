// A job that lost a rank goes on from the checkpoint that is on the disk, over a real log and
// history.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "coordinator/service/job_files.h"
#include "tests/coordinator/service/checkpoint_files.h"
#include "tests/coordinator/service/service_fixture.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(ServiceTest, AJobThatLostItsRankGoesOnFromItsCheckpointAndItsHistoryIsThatOfOneRun) {
  auto coordinator = std::make_unique<Coordinator>(folder.path());
  v1::JobSpec spec = Spec(1, 5);
  spec.mutable_checkpoint()->set_dir(folder / "ckpt");
  v1::SubmitResponse response;
  w0.Connect(*coordinator);
  const grpc::Status submitted = coordinator->Submit(spec, &response);
  ASSERT_TRUE(submitted.ok()) << submitted.error_message();
  w0.TakeAssignment();
  ASSERT_TRUE(w0.Barrier("start").ok());
  ASSERT_TRUE(w0.Steps(1, 4, &committed).ok());
  const std::string path = WriteCheckpoint(spec, "demo-1", 2);  // nobody has reported it
  v1::MemberMessage leaves;
  leaves.mutable_goodbye()->set_reason("SIGTERM");
  w0.Say(leaves);
  w1.Connect(*coordinator);
  w1.TakeAssignment();
  EXPECT_EQ(w1.assign().generation(), 2u);
  EXPECT_EQ(w1.assign().first_step(), 3u);
  EXPECT_EQ(w1.assign().resume().checkpoint(), path);
  EXPECT_EQ(coordinator->Get("demo").steps_lost(), 2u);

  // The row is what the next coordinator goes by.
  w1.Disconnect();
  coordinator.reset();
  coordinator = std::make_unique<Coordinator>(folder.path());
  EXPECT_EQ(coordinator->Get("demo").committed_step(), 2u);
  w1.Connect(*coordinator, /*running=*/true);
  ASSERT_TRUE(w1.Barrier("start").ok());
  ASSERT_TRUE(w1.Steps(3, 5, &committed).ok());
  EXPECT_EQ(committed, 5u);
  EXPECT_TRUE(w1.End(true).ok());
  const auto [status, steps] = coordinator->WatchToTheEnd("demo");
  EXPECT_EQ(status.state(), v1::JOB_STATE_COMPLETED) << status.reason();
  EXPECT_THAT(steps, ElementsAre(1, 2, 3, 4, 5));
  EXPECT_EQ(status.steps_lost(), 2u);
}

TEST_F(ServiceTest, AFolderOfCheckpointsThatIsAwayCostsNoHistoryAndIsGoneOnFromOnceItIsBack) {
  Coordinator coordinator(folder.path());
  v1::JobSpec spec = Spec(1, 5);
  spec.mutable_checkpoint()->set_dir(folder / "ckpt");
  v1::SubmitResponse response;
  w0.Connect(coordinator);
  const grpc::Status submitted = coordinator.Submit(spec, &response);
  ASSERT_TRUE(submitted.ok()) << submitted.error_message();
  w0.TakeAssignment();
  ASSERT_TRUE(w0.Barrier("start").ok());
  ASSERT_TRUE(w0.Steps(1, 4, &committed).ok());
  v1::ReportStepsRequest saved;
  v1::CheckpointRecord& record = *saved.add_checkpoints();
  record.set_step(2);
  record.set_path(WriteCheckpoint(spec, "demo-1", 2));
  record.set_complete(true);
  ASSERT_TRUE(w0.Report(saved).ok());
  std::filesystem::rename(folder / "ckpt", folder / "away");
  v1::MemberMessage leaves;
  leaves.mutable_goodbye()->set_reason("SIGTERM");
  w0.Say(leaves);
  std::string reason;
  for (int i = 0; i < 1000 && !absl::StrContains(reason, "no complete one"); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    reason = coordinator.Get("demo").reason();
  }
  EXPECT_THAT(reason, HasSubstr("the coordinator finds no complete one in " + (folder / "ckpt")));
  EXPECT_EQ(coordinator.Get("demo").committed_step(), 4u);
  const auto ends = JobFiles(folder.path()).Recover("jobs/demo", /*repair=*/false);
  EXPECT_EQ(ends->last.step(), 4u);

  std::filesystem::rename(folder / "away", folder / "ckpt");
  w1.Connect(coordinator);
  w1.TakeAssignment();
  EXPECT_EQ(w1.assign().first_step(), 3u);
  EXPECT_EQ(w1.assign().resume().checkpoint(), record.path());
}

}  // namespace
}  // namespace zeroshard::coordinator
