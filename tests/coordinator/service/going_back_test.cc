// A job that lost a rank goes on from the checkpoint that is on the disk, over a real log and
// history.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/service/checkpoint_files.h"
#include "tests/coordinator/service/service_fixture.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::ElementsAre;

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

}  // namespace
}  // namespace zeroshard::coordinator
