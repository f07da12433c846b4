// Following a job through absences of the coordinator.
#include "client/watch.h"

#include <chrono>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/client/fake_jobs.h"

namespace zeroshard {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

TEST(FollowJob, ThePauseDoublesEachTimeWhileTheCoordinatorIsAway) {
  FakeJobs fake;
  const grpc::Status away(grpc::StatusCode::UNAVAILABLE, "socket closed");
  for (int i = 0; i < 4; ++i) fake.watches.push_back({{}, away});
  fake.AddWatch(Job("tiny", v1::JOB_STATE_COMPLETED, "done"), {Step(1, 5)});
  const auto client = *JobsClient::Create(fake.address(), absl::Seconds(30));
  StopToken stop;
  std::vector<steady_clock::time_point> pauses;  // when each begins, and when the last has ended
  const auto now = [&] { pauses.push_back(steady_clock::now()); };
  const auto status = FollowJob(client.get(), "tiny", absl::Seconds(60), &SystemClock::Get(), &stop,
                                {[&](const v1::WatchUpdate&) { now(); },
                                 [&](const std::string& reason) {
                                   EXPECT_NE(reason.find("socket closed"), std::string::npos);
                                   now();
                                 }});
  ASSERT_TRUE(status.ok()) << status.status();
  ASSERT_EQ(pauses.size(), 5u);
  // A loaded machine makes them longer, nothing shorter.
  milliseconds wanted(100);
  for (size_t i = 0; i + 1 < pauses.size(); ++i, wanted *= 2) {
    EXPECT_GE(pauses[i + 1] - pauses[i], wanted) << i;
  }
}

}  // namespace
}  // namespace zeroshard
