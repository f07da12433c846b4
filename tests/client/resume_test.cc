// What is submitted where a job goes on from a checkpoint, and how checkpoints, evaluations and
// samples are shown.
#include "client/resume.h"

#include <filesystem>
#include <string>
#include <vector>

#include "common/checkpoint/folder_lock.h"
#include "common/checkpoint/store.h"
#include "common/exit_codes.h"
#include "common/spec/job_spec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/command_fixture.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class ResumeTest : public CommandTest {
 protected:
  ResumeTest() { dir_ = (folder_ / "ckpt").string(); }

  v1::JobSpec Spec(uint64_t steps) {
    absl::StatusOr<v1::JobSpec> spec = ParseJobSpec(kJob, "job", {});
    EXPECT_TRUE(spec.ok()) << spec.status();
    spec->set_steps(steps);
    spec->mutable_checkpoint()->set_dir(dir_);
    const absl::Status status = NormaliseJobSpec(&*spec);
    EXPECT_TRUE(status.ok()) << status;
    return *spec;
  }

  // A complete checkpoint of the job at a step.
  void Save(uint64_t step) {
    CheckpointStoreOptions options;
    options.dir = dir_;
    options.job = "tiny";
    options.run_id = "tiny-1";
    const auto store = CheckpointStore::Open(&FileSystem::Real(), options);
    ASSERT_TRUE(store.ok()) << store.status();
    const absl::StatusOr<std::string> folder = (*store)->Begin(step);
    ASSERT_TRUE(folder.ok()) << folder.status();
    const std::vector<float> values(64, 1.0f);
    const auto file = WriteStateFile(&FileSystem::Real(), *folder, 0, 1,
                                     {{.kind = StateKind::kMaster,
                                       .tensor = "ln_f.weight",
                                       .shape = {64},
                                       .begin = 0,
                                       .end = 64,
                                       .values = values.data()}});
    ASSERT_TRUE(file.ok()) << file.status();
    Manifest manifest;
    manifest.run_id = options.run_id;
    manifest.job = options.job;
    manifest.step = step;
    manifest.world_size = 1;
    manifest.spec = Spec(step);
    manifest.files = {*file};
    const auto path = (*store)->Complete(manifest);
    ASSERT_TRUE(path.ok()) << path.status();
  }

  absl::StatusOr<v1::SubmitRequest> Local(uint64_t steps, const ResumeOptions& options = {}) {
    notices_.clear();
    return MakeLocalRequest(Spec(steps), options,
                            [this](const std::string& text) { notices_ += text + "\n"; });
  }

  static ResumeOptions Fresh() {
    ResumeOptions options;
    options.fresh = true;
    return options;
  }

  std::string dir_;
  std::string notices_;
};

TEST_F(ResumeTest, SubmitSendsWhatToGoOnFrom) {
  EXPECT_EQ(Run({"submit", job_}).code, kExitOk);
  EXPECT_EQ(fake_.submitted.resume_from(), "");
  EXPECT_EQ(Run({"submit", job_, "--resume-from", "latest"}).code, kExitOk);
  EXPECT_EQ(fake_.submitted.resume_from(), "latest");
  EXPECT_FALSE(fake_.submitted.weights_only());
  EXPECT_EQ(Run({"submit", job_, "--resume-from", "some/where", "--weights-only"}).code, kExitOk);
  EXPECT_EQ(fake_.submitted.resume_from(), (fs::current_path() / "some/where").string());
  EXPECT_TRUE(fake_.submitted.weights_only());
}

TEST_F(ResumeTest, WeightsOnlyNeedsACheckpoint) {
  const Outcome outcome = Run({"submit", job_, "--weights-only"});
  EXPECT_EQ(outcome.code, kExitUsage);
  EXPECT_THAT(outcome.err, HasSubstr("--resume-from DIR"));
}

TEST_F(ResumeTest, CancelSaysWhetherToSave) {
  fake_.jobs = {Job("a", v1::JOB_STATE_RUNNING, "")};
  EXPECT_EQ(Run({"cancel", "a"}).code, kExitOk);
  EXPECT_FALSE(fake_.cancelled.save());
  EXPECT_EQ(Run({"cancel", "a", "--save"}).code, kExitOk);
  EXPECT_TRUE(fake_.cancelled.save());
}

TEST_F(ResumeTest, EveryPathOfASubmittedJobIsAbsolute) {
  Write(job_, absl::StrCat(kJob, "eval: {data: [val.txt], interval_steps: 1}\n",
                           "checkpoint: {dir: ckpt}\n"));
  const Outcome outcome = Run({"submit", job_, "--set", "data.tokenizer=tok/tokenizer.json"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  const v1::JobSpec& spec = fake_.submitted.spec();
  EXPECT_EQ(spec.eval().data(0), (folder_ / "val.txt").string());
  EXPECT_EQ(spec.checkpoint().dir(), dir_);
  EXPECT_EQ(spec.data().tokenizer(), (folder_ / "tok/tokenizer.json").string());
}

TEST_F(ResumeTest, AModelWhoseFolderIsGoneIsTheCheckpoints) {
  Write(job_, absl::StrCat("name: tiny\nmodel: {init_from: gone}\n",
                           "data: {train: [/abs/b], tokenizer: bytes}\nresources: {workers: 2}\n",
                           "train_batch_size: 8\ntrain_micro_batch_size_per_gpu: 2\nsteps: 20\n",
                           "checkpoint: {dir: ckpt}\n"));
  Outcome outcome = Run({"submit", job_, "--resume-from", "latest"});
  EXPECT_EQ(outcome.code, kExitNotFound);
  EXPECT_THAT(outcome.err, HasSubstr("model.init_from"));

  Save(4);
  for (const std::string& from : {std::string("latest"), dir_, dir_ + "/step-00000004"}) {
    outcome = Run({"submit", job_, "--resume-from", from});
    EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("is not here; the model is the checkpoint's"));
    EXPECT_EQ(fake_.submitted.spec().model().hidden_size(), 64u);
    EXPECT_EQ(fake_.submitted.spec().model().init_from(), (folder_ / "gone").string());
  }
  // Whoever starts anew wants the folder.
  EXPECT_EQ(Run({"submit", job_}).code, kExitNotFound);
  EXPECT_EQ(Run({"validate", job_}).code, kExitNotFound);
}

TEST_F(ResumeTest, LocalStartsAnewWithoutCheckpoints) {
  const auto request = Local(10);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->resume_from(), "");
  EXPECT_THAT(notices_, IsEmpty());
}

TEST_F(ResumeTest, LocalGoesOnFromTheNewestCheckpointAndSaysSo) {
  Save(4);
  const auto request = Local(10);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->resume_from(), "latest");
  EXPECT_THAT(notices_, AllOf(HasSubstr("step-00000004"), HasSubstr("--fresh")));
}

TEST_F(ResumeTest, LocalSaysThatAFinishedJobIsFinished) {
  Save(10);
  const auto request = Local(10);
  EXPECT_TRUE(absl::IsAlreadyExists(request.status()));
  EXPECT_THAT(std::string(request.status().message()),
              AllOf(HasSubstr("step 10 of 10"), HasSubstr("--fresh")));
  EXPECT_TRUE(Local(11).ok());
}

TEST_F(ResumeTest, FreshMovesEarlierCheckpointsAside) {
  Save(10);
  const auto request = Local(10, Fresh());
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->resume_from(), "");
  EXPECT_FALSE(fs::exists(dir_ + "/step-00000010"));
  EXPECT_FALSE(fs::exists(dir_ + "/latest"));
  EXPECT_TRUE(fs::exists(dir_ + "/old-1/step-00000010/manifest.json"));
  Write(dir_ + "/thesis.tex", "not a checkpoint");
  Save(10);
  ASSERT_TRUE(Local(10, Fresh()).ok());
  EXPECT_TRUE(fs::exists(dir_ + "/old-2/step-00000010/manifest.json"));
  EXPECT_TRUE(fs::exists(dir_ + "/thesis.tex"));
  ASSERT_TRUE(Local(10, Fresh()).ok());  // nothing left to move
  EXPECT_FALSE(fs::exists(dir_ + "/old-3"));
}

TEST_F(ResumeTest, FreshLeavesTheFolderOfARunningJob) {
  Save(10);
  {
    const auto holder = CheckpointLock::Take(dir_, "other", "other-7");
    ASSERT_TRUE(holder.ok()) << holder.status();
    const auto request = Local(10, Fresh());
    EXPECT_TRUE(absl::IsFailedPrecondition(request.status())) << request.status();
    EXPECT_THAT(std::string(request.status().message()), HasSubstr("other"));
    EXPECT_TRUE(fs::exists(dir_ + "/step-00000010"));
  }
  EXPECT_TRUE(Local(10, Fresh()).ok());
}

TEST_F(ResumeTest, FreshAndResumeExcludeEachOther) {
  ResumeOptions both = Fresh();
  both.from = "latest";
  EXPECT_TRUE(absl::IsInvalidArgument(Local(10, both).status()));
}

TEST_F(ResumeTest, ACheckpointFolderThatIsAFileIsNamedWithItsKey) {
  Write(dir_, "a file");
  const auto request = Local(10);
  EXPECT_TRUE(absl::IsInvalidArgument(request.status()));
  EXPECT_THAT(std::string(request.status().message()),
              AllOf(HasSubstr("checkpoint.dir: "), HasSubstr("is no folder")));
}

TEST_F(ResumeTest, AFolderWhoseOnlyCheckpointIsDamagedIsNoStartAnew) {
  Save(4);
  ASSERT_TRUE(fs::remove(dir_ + "/step-00000004/state-00000-of-00001.safetensors"));
  const auto request = Local(10);
  EXPECT_TRUE(absl::IsDataLoss(request.status())) << request.status();
  EXPECT_THAT(std::string(request.status().message()),
              AllOf(HasSubstr("state-00000-of-00001.safetensors"), HasSubstr("--fresh")));
  EXPECT_TRUE(Local(10, Fresh()).ok());
}

TEST_F(ResumeTest, ASaveThatWasNeverCompleteIsPassedOver) {
  fs::create_directories(dir_ + "/step-00000004");
  const auto request = Local(10);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->resume_from(), "");
  EXPECT_THAT(notices_, HasSubstr("starting anew"));
}

TEST_F(ResumeTest, WhatIsPassedOverIsNamed) {
  Save(4);
  fs::create_directories(dir_ + "/step-00000006");
  const auto request = Local(10);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_THAT(notices_, AllOf(HasSubstr("not used: "), HasSubstr("step-00000006"),
                              HasSubstr("going on from "), HasSubstr("step-00000004")));
}

TEST_F(ResumeTest, WhatTheUserNamesCounts) {
  Save(4);
  ResumeOptions named;
  named.from = "/elsewhere";
  named.weights_only = true;
  const auto request = Local(10, named);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->resume_from(), "/elsewhere");
  EXPECT_TRUE(request->weights_only());
}

TEST_F(ResumeTest, WatchShowsEvaluationsCheckpointsAndSamples) {
  v1::JobStatus running = Job("tiny", v1::JOB_STATE_RUNNING, "");
  const auto event = [](v1::JobStatus* status, const std::string& reason) {
    v1::JobEvent* event = status->add_events();
    event->set_unix_ms(1000 + status->events_size());
    event->set_state(v1::JOB_STATE_RUNNING);
    event->set_reason(reason);
  };
  event(&running, "2 ranks started");
  event(&running, "checkpoint of step 1 complete");
  fake_.jobs = {running};
  v1::WatchUpdate first;
  *first.mutable_status() = running;
  v1::WatchUpdate second = first;
  event(second.mutable_status(), "checkpoint of step 2 abandoned: disk full");
  v1::StepRecord step = Step(2, 2.25);
  step.set_eval_loss(3.5);
  *second.add_records() = step;
  v1::SampleRecord* sample = second.add_samples();
  sample->set_step(2);
  sample->set_prompt("Once");
  sample->set_text(" upon\na\033[2Jtime");
  // The coordinator keeps so many events only.
  second.mutable_status()->mutable_events()->DeleteSubrange(0, 1);
  v1::WatchUpdate last = second;
  last.clear_records();
  last.clear_samples();
  last.mutable_status()->set_state(v1::JOB_STATE_COMPLETED);
  fake_.watches.push_back({{first, second, last}, grpc::Status::OK});

  const Outcome outcome = Run({"watch", "tiny"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("step 2/2  loss 2.2500  eval 3.5000"));
  EXPECT_THAT(outcome.out, HasSubstr("checkpoint of step 2 abandoned: disk full\n"));
  EXPECT_THAT(outcome.out, Not(HasSubstr("checkpoint of step 1")));  // it was there before
  EXPECT_THAT(outcome.out, HasSubstr("step 2: Once upon\\na\\x1b[2Jtime\n"));
}

}  // namespace
}  // namespace zeroshard
