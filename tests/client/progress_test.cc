// What is shown of a job that is followed.
#include "client/progress.h"

#include <sstream>
#include <string>

#include "gtest/gtest.h"
#include "tests/client/fake_jobs.h"

namespace zeroshard {
namespace {

class ProgressViewTest : public testing::Test {
 protected:
  ProgressViewTest() { env_.out = &out_; }
  static void AddEvent(v1::JobStatus* status, v1::JobState state, const std::string& reason) {
    v1::JobEvent& event = *status->add_events();
    event.set_unix_ms(1000 + status->events_size());
    event.set_state(state);
    event.set_reason(reason);
    status->set_state(state);
    status->set_reason(reason);
  }
  std::string Shown(const v1::JobStatus& status) {
    v1::WatchUpdate update;
    *update.mutable_status() = status;
    out_.str("");
    view_.Update(update);
    return out_.str();
  }

  std::ostringstream out_;
  Environment env_;
  Console console_{env_};
  ProgressMeter meter_;
  ProgressView view_{&console_, &SystemClock::Get(), &meter_};
};

TEST_F(ProgressViewTest, WhatPassedBetweenTwoUpdatesIsToldInItsOrder) {
  v1::JobStatus job = Job("tiny", v1::JOB_STATE_QUEUED, "");
  AddEvent(&job, v1::JOB_STATE_PLACING, "generation 1");
  AddEvent(&job, v1::JOB_STATE_RUNNING, "all ranks have started");
  EXPECT_EQ(Shown(job), "tiny-1 RUNNING: all ranks have started\n") << "the rest is no news";
  AddEvent(&job, v1::JOB_STATE_RUNNING, "checkpoint of step 4");
  AddEvent(&job, v1::JOB_STATE_RECOVERING, "rank 1 is gone");
  AddEvent(&job, v1::JOB_STATE_RECOVERING, "back to step 4");
  AddEvent(&job, v1::JOB_STATE_RUNNING, "all ranks have started");
  EXPECT_EQ(Shown(job),
            "checkpoint of step 4\n"
            "tiny-1 RECOVERING: rank 1 is gone\n"
            "back to step 4\n"
            "tiny-1 RUNNING: all ranks have started\n");
  EXPECT_EQ(Shown(job), "") << "nothing is told twice";
}

}  // namespace
}  // namespace zeroshard
