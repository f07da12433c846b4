// The worker against a coordinator that does what the test says: a job's life, its failures, and
// that nothing of it stays behind.
#include "worker/agent/worker_agent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "common/hf/config.h"
#include "common/status_payloads.h"
#include "tests/worker/agent/worker_agent_fixture.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(WorkerAgentTest, TrainsReportsEveryStepAndSaysThatItIsDone) {
  Assign(Job("a-1"));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_TRUE(end.completed()) << end.message();
  EXPECT_EQ(end.weights_digest(), "digest");
  EXPECT_EQ(end.fence().run_id(), "a-1");
  EXPECT_EQ(end.fence().member(), "worker-0");
  EXPECT_EQ(end.fence().incarnation(), agent_->session()->incarnation());
  cluster_.With([](auto& state) {
    ASSERT_EQ(state.steps.size(), 20u);
    for (size_t i = 0; i < 20; ++i) {
      EXPECT_EQ(state.steps[i].step(), i + 1);
      EXPECT_EQ(state.steps[i].loss(), 1.0 / (i + 1.0));
    }
    EXPECT_EQ(state.barriers.count("start"), 1u);
    EXPECT_EQ(state.barriers.count("finish"), 1u);
    EXPECT_EQ(state.keys.at("address/0"), "host-a");
  });
  EXPECT_TRUE(AwaitIdle());
  EXPECT_EQ(training_.alive, 0);
}

TEST_F(WorkerAgentTest, SumsAreInRankOrderWhereTheJobIsDeterministic) {
  std::vector<bool> asked;
  training_.on_connect = [&](const CommunicatorOptions& options) {
    asked.push_back(options.deterministic);
  };
  v1::Assign job = Job("a-1");
  Assign(job);
  EXPECT_TRUE(AwaitEnd(1).completed());
  EXPECT_TRUE(AwaitIdle());
  job = Job("b-1");
  job.mutable_spec()->set_deterministic(true);
  Assign(job);
  EXPECT_TRUE(AwaitEnd(2).completed());
  EXPECT_EQ(asked, (std::vector<bool>{false, true}));
}

TEST_F(WorkerAgentTest, ARankOfAMeshGetsItsLines) {
  std::vector<std::string> lines;
  std::vector<std::vector<int>> ranks;
  training_.on_connect = [&](const CommunicatorOptions& options) {
    lines.push_back(options.line.substr(0, options.line.find(" (")));
    ranks.push_back(options.job_ranks);
  };
  TrainerMesh mesh;
  int data_ranks = 0;
  training_.on_create = [&](const TrainerOptions& options) {
    mesh = options.mesh;
    data_ranks = options.comm->size();
  };
  v1::Assign job = Job("a-1", 0, 8);
  job.mutable_mesh()->set_pipeline(2);
  job.mutable_mesh()->set_data(2);
  job.mutable_mesh()->set_tensor(2);
  v1::JobSpec& spec = *job.mutable_spec();
  spec.mutable_parallel()->set_pipeline(2);
  spec.mutable_parallel()->set_tensor(2);
  spec.mutable_parallel()->set_virtual_stages(3);
  Assign(job);
  EXPECT_TRUE(AwaitEnd().completed());
  EXPECT_EQ(lines,
            (std::vector<std::string>{"", "data line 0", "tensor line 0", "pipeline line 0"}));
  EXPECT_EQ(ranks, (std::vector<std::vector<int>>{{}, {0, 2}, {0, 1}, {0, 4}}));
  EXPECT_EQ(data_ranks, 2);
  EXPECT_EQ(mesh.shape.Ranks(), 8);
  EXPECT_EQ(mesh.virtual_stages, 3);
  cluster_.With([](auto& state) {
    EXPECT_EQ(state.keys.count("tensor/0/address/0"), 1u) << "named by line under the generation";
  });
  EXPECT_TRUE(AwaitIdle());
  EXPECT_EQ(training_.alive, 0);
}

TEST_F(WorkerAgentTest, AMeshThatIsNotTheSpecificationsIsRefused) {
  v1::Assign job = Job("a-1", 0, 8);
  job.mutable_mesh()->set_pipeline(2);
  job.mutable_mesh()->set_data(2);
  job.mutable_mesh()->set_tensor(2);
  Assign(job);
  v1::ReportEndRequest end = AwaitEnd(1);
  EXPECT_EQ(end.error_code(), "INVALID_ARGUMENT");
  EXPECT_THAT(end.message(),
              AllOf(HasSubstr("2 pipeline x 2 data x 2 tensor"), HasSubstr("parallel.pipeline 1")));
  EXPECT_TRUE(AwaitIdle());
  job = Job("b-1", 0, 8);
  job.mutable_mesh();  // nothing along any dimension
  Assign(job);
  end = AwaitEnd(2);
  EXPECT_EQ(end.error_code(), "INVALID_ARGUMENT");
  EXPECT_THAT(end.message(), HasSubstr("0 pipeline x 0 data x 0 tensor"));
}

TEST_F(WorkerAgentTest, ServesTheNextJobWithoutARestart) {
  for (int i = 1; i <= 3; ++i) {
    cluster_.With([](auto& state) { state.steps.clear(); });
    Assign(Job("a-" + std::to_string(i)));
    const v1::ReportEndRequest end = AwaitEnd(i);
    EXPECT_TRUE(end.completed()) << end.message();
    EXPECT_EQ(end.fence().run_id(), "a-" + std::to_string(i));
  }
  EXPECT_TRUE(AwaitIdle());
  EXPECT_EQ(training_.trainers, 3);
  EXPECT_EQ(training_.alive, 0);
}

TEST_F(WorkerAgentTest, HeartbeatsCarryTheStepAndThePhase) {
  training_.on_step = [this](uint64_t step) {
    return step < 7 ? absl::OkStatus() : training_.WaitForAbort();
  };
  Assign(Job("a-1"));
  EXPECT_TRUE(cluster_.Await([](const auto& state) {
    const v1::Heartbeat& beat = state.heartbeats.back();
    return beat.running().run_id() == "a-1" && beat.progress().step() == 7 &&
           beat.progress().phase() == "forward" && beat.progress().advances() >= 7;
  }));
}

TEST_F(WorkerAgentTest, AStopUnblocksTheCollectivesAndFreesEverything) {
  training_.on_step = [this](uint64_t) { return training_.WaitForAbort(); };
  Assign(Job("a-1"));
  ASSERT_TRUE(AwaitStep(1));
  StopRun("a-1", "cancelled by the user");
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_FALSE(end.completed());
  EXPECT_EQ(end.error_code(), "CANCELLED");
  EXPECT_EQ(end.message(), "cancelled by the user");
  EXPECT_TRUE(AwaitIdle());
  EXPECT_EQ(training_.alive, 0);
}

TEST_F(WorkerAgentTest, AStopEndsTheWaitForOtherRanks) {
  cluster_.With([](auto& state) { state.world = 2; });
  Assign(Job("a-1", 0, 2));
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return state.barriers.count("start") > 0; }));
  StopRun("a-1", "rank 1 is gone");
  EXPECT_EQ(AwaitEnd().message(), "rank 1 is gone");
  EXPECT_TRUE(AwaitIdle());
}

TEST_F(WorkerAgentTest, AStopEndsConnectingToOtherRanks) {
  training_.lonely = true;
  v1::Assign job = Job("a-1", 0, 2);
  job.mutable_spec()->mutable_timeouts()->set_start_seconds(3600);
  Assign(job);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return state.keys.count("address/0") > 0; }));
  StopRun("a-1", "rank 1 is gone");
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.error_code(), "CANCELLED");
  EXPECT_EQ(end.message(), "rank 1 is gone");
  EXPECT_TRUE(AwaitIdle());
}

TEST_F(WorkerAgentTest, ACoordinatorThatIsAwayForLongerThanABarrierMayTakeFailsNothing) {
  absl::Notification away;
  training_.on_step = [&](uint64_t step) {
    if (step == 20) {
      cluster_.Stop();  // the finish barrier finds nobody
      away.Notify();
    }
    return absl::OkStatus();
  };
  v1::Assign job = Job("a-1");
  job.mutable_spec()->mutable_timeouts()->set_step_seconds(1);
  Assign(job);
  ASSERT_TRUE(away.WaitForNotificationWithTimeout(absl::FromChrono(FakeCluster::kPatience)));
  // A call that does give up, somewhat later than the barrier may take.
  ClusterClient other(cluster_.address());
  EXPECT_FALSE(other.GetKey({}, "never", absl::Milliseconds(1500), nullptr).ok());
  cluster_.Start();
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_TRUE(end.completed()) << end.message();
  cluster_.With([](auto& state) { EXPECT_EQ(state.steps.size(), 20u); });
}

TEST_F(WorkerAgentTest, AStopOfAnotherRunChangesNothing) {
  training_.on_step = [this](uint64_t step) {
    if (step == 1) StopRun("a-0", "an old one");
    return absl::OkStatus();
  };
  Assign(Job("a-1"));
  EXPECT_TRUE(AwaitEnd().completed());
}

TEST_F(WorkerAgentTest, MissingDataFailsTheJobWithOneMessage) {
  v1::Assign job = Job("a-1");
  job.mutable_spec()->mutable_data()->set_train(0, folder_ / "none");
  Assign(job);
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.error_code(), "NOT_FOUND");
  EXPECT_THAT(end.message(), HasSubstr(folder_ / "none"));
  EXPECT_TRUE(AwaitIdle());
  cluster_.With([](auto& state) { EXPECT_EQ(state.ends.size(), 1u); });
}

TEST_F(WorkerAgentTest, RanksThatSeeDifferentDataDoNotTrain) {
  cluster_.With([](auto& state) { state.keys["data.train/tokens"] = "1000"; });
  Assign(Job("a-1", 1, 2));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.error_code(), "INVALID_ARGUMENT");
  EXPECT_THAT(end.message(),
              AllOf(HasSubstr("rank 1 on host-a sees 21 tokens"), HasSubstr("rank 0 sees 1000")));
}

TEST_F(WorkerAgentTest, ADeterministicJobRefusesRanksThatComputeInDifferentWays) {
  cluster_.With([](auto& state) {
    state.keys["data.train/tokens"] = "21";
    state.keys["numerics"] = "avx512";
  });
  v1::Assign job = Job("a-1", 1, 2);
  job.mutable_spec()->set_deterministic(true);
  job.mutable_spec()->set_tf32(true);
  Assign(job);
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.error_code(), "INVALID_ARGUMENT");
  EXPECT_THAT(end.message(), AllOf(HasSubstr("rank 1 on host-a computes with \"avx512 tf32\""),
                                   HasSubstr("rank 0 with \"avx512\"")));
}

TEST_F(WorkerAgentTest, RanksOfOneFingerprintTrainDeterministicallyAndOthersNeedNone) {
  cluster_.With([](auto& state) {
    state.keys["data.train/tokens"] = "21";
    state.keys["numerics"] = "avx512 tf32";
  });
  v1::Assign job = Job("a-1", 1, 2);
  job.mutable_spec()->set_deterministic(true);
  job.mutable_spec()->set_tf32(true);
  Assign(job);
  EXPECT_TRUE(AwaitEnd().completed());
  ASSERT_TRUE(AwaitIdle());
  Assign(Job("b-1", 1, 2));
  EXPECT_TRUE(AwaitEnd(2).completed());
}

TEST_F(WorkerAgentTest, TheTrainersErrorIsReportedWithTheRankItBlames) {
  training_.on_step = [](uint64_t step) {
    if (step < 3) return absl::OkStatus();
    absl::Status status = absl::InternalError("step 3: non-finite loss on rank 2, sample 17");
    SetBlamedRank(2, &status);
    MarkNonFinite(&status);
    return status;
  };
  Assign(Job("a-1"));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_FALSE(end.completed());
  EXPECT_EQ(end.error_code(), "INTERNAL");
  EXPECT_EQ(end.message(), "step 3: non-finite loss on rank 2, sample 17");
  EXPECT_EQ(end.blamed_rank(), 2u);
  EXPECT_TRUE(end.nonfinite());
  cluster_.With([](auto& state) { EXPECT_EQ(state.steps.size(), 2u); });
  EXPECT_TRUE(AwaitIdle());
  EXPECT_EQ(training_.alive, 0);
}

TEST_F(WorkerAgentTest, OutOfMemoryIsAnErrorOfTheJobNotTheEndOfTheWorker) {
  training_.on_step = [](uint64_t) -> absl::Status { throw std::bad_alloc(); };
  Assign(Job("a-1"));
  const v1::ReportEndRequest failed = AwaitEnd();
  EXPECT_EQ(failed.error_code(), "RESOURCE_EXHAUSTED");
  EXPECT_FALSE(failed.nonfinite());
  training_.on_step = [](uint64_t) { return absl::OkStatus(); };
  ASSERT_TRUE(AwaitIdle());
  Assign(Job("a-2"));
  EXPECT_TRUE(AwaitEnd(2).completed());
}

TEST_F(WorkerAgentTest, ARestartOfTheCoordinatorPausesReportsAndLosesNoStep) {
  training_.on_step = [this](uint64_t step) {
    if (step == 5) cluster_.Stop();
    if (step == 15) cluster_.Start();
    return absl::OkStatus();
  };
  Assign(Job("a-1"));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_TRUE(end.completed()) << end.message();
  cluster_.With([](auto& state) {
    ASSERT_EQ(state.steps.size(), 20u);
    for (size_t i = 0; i < 20; ++i) EXPECT_EQ(state.steps[i].step(), i + 1);
  });
}

TEST_F(WorkerAgentTest, ARankWhoseReportsAreStaleStops) {
  cluster_.With([](auto& state) {
    state.report_steps_status = {grpc::StatusCode::FAILED_PRECONDITION, "generation 2 is current"};
  });
  training_.on_step = [this](uint64_t step) {
    return step < 3 ? absl::OkStatus() : training_.WaitForAbort();
  };
  Assign(Job("a-1"));
  EXPECT_THAT(AwaitEnd().message(), HasSubstr("generation 2 is current"));
  EXPECT_TRUE(AwaitIdle());
}

TEST_F(WorkerAgentTest, AFencedWorkerDropsItsJobAndComesBackAsAnother) {
  training_.on_step = [this](uint64_t) { return training_.WaitForAbort(); };
  Assign(Job("a-1"));
  ASSERT_TRUE(AwaitStep(1));
  const std::string first = agent_->session()->incarnation();
  cluster_.With([first](auto& state) {
    state.answer = [first](const v1::Hello& hello) {
      return hello.incarnation() == first ? FakeCluster::Refusal("lost", true)
                                          : FakeCluster::Welcome(1);
    };
  });
  cluster_.Send(FakeCluster::Refusal("lost", true));
  ASSERT_TRUE(cluster_.Await([&](const auto& state) {
    return state.hellos.back().incarnation() != first && !state.heartbeats.back().has_running();
  }));
  EXPECT_EQ(training_.alive, 0);
  training_.on_step = [](uint64_t) { return absl::OkStatus(); };
  size_t ends = 0;
  cluster_.With([&](auto& state) { ends = state.ends.size(); });
  Assign(Job("a-2"));
  const v1::ReportEndRequest end = AwaitEnd(ends + 1);
  EXPECT_TRUE(end.completed());
  EXPECT_EQ(end.fence().incarnation(), agent_->session()->incarnation());
}

TEST_F(WorkerAgentTest, AnotherAssignmentEndsTheRunThatIsHereWithoutAWord) {
  training_.on_step = [this](uint64_t) {
    return training_.trainers == 1 ? training_.WaitForAbort() : absl::OkStatus();
  };
  Assign(Job("a-1"));
  ASSERT_TRUE(AwaitStep(1));
  Assign(Job("b-2"));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.fence().run_id(), "b-2");
  EXPECT_TRUE(end.completed()) << end.message();
}

TEST_F(WorkerAgentTest, AnAssignmentSaidTwiceIsOneRun) {
  v1::Assign job = SavingJob("a-1");
  TrainSlowly(&job);
  Assign(job);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return !state.steps.empty(); }));
  Assign(job);
  // What ends the run comes after it.
  StopRun("a-1", "enough", /*save=*/true);
  EXPECT_THAT(AwaitEnd().message(), HasSubstr("saved step"));
  EXPECT_TRUE(AwaitIdle());
  EXPECT_EQ(training_.trainers, 1);
}

TEST_F(WorkerAgentTest, GoingOnInTheMiddleIsRefusedWithoutACheckpoint) {
  v1::Assign job = Job("a-1");
  job.set_first_step(5);
  Assign(job);
  EXPECT_THAT(AwaitEnd().message(), HasSubstr("go on at step 5 from no checkpoint"));
}

TEST_F(WorkerAgentTest, TheTrainerLearnsWhereToGoOnFrom) {
  std::string seen;
  training_.on_create = [&](const TrainerOptions& options) {
    seen = absl::StrCat(options.resume_from, " ", options.weights_only, " ", options.first_step,
                        " ", options.job, " ", options.run_id);
  };
  v1::Assign job = Job("a-2");
  job.set_first_step(5);
  job.mutable_resume()->set_checkpoint("/ckpt/step-00000004");
  Assign(job);
  EXPECT_TRUE(AwaitEnd().completed());
  EXPECT_EQ(seen, "/ckpt/step-00000004 0 5 a a-2");
  cluster_.With([](auto& state) { EXPECT_EQ(state.steps.front().step(), 5u); });
}

TEST_F(WorkerAgentTest, TheTrainerGetsTheValidationSetAndTheTokenizer) {
  std::ofstream(folder_ / "held_out") << "text to measure on";  // 18 bytes
  int64_t eval_tokens = 0, vocab = 0;
  training_.on_create = [&](const TrainerOptions& options) {
    if (options.eval_data != nullptr) eval_tokens = options.eval_data->token_count();
    if (options.tokenizer != nullptr) vocab = options.tokenizer->vocab_size();
  };
  v1::Assign job = Job("a-1");
  job.mutable_spec()->mutable_eval()->add_data(folder_ / "held_out");
  job.mutable_spec()->mutable_sample()->add_prompts("Once");
  Assign(job);
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_TRUE(end.completed()) << end.message();
  EXPECT_EQ(eval_tokens, 18);
  EXPECT_EQ(vocab, 256);
}

TEST_F(WorkerAgentTest, AMissingValidationSetIsNamed) {
  v1::Assign job = Job("a-1");
  job.mutable_spec()->mutable_eval()->add_data(folder_ / "none");
  Assign(job);
  EXPECT_THAT(AwaitEnd().message(), AllOf(HasSubstr("eval.data"), HasSubstr(folder_ / "none")));
}

TEST_F(WorkerAgentTest, RanksThatSeeDifferentValidationSetsDoNotTrain) {
  std::ofstream(folder_ / "held_out") << "text to measure on";
  cluster_.With([](auto& state) {
    state.keys["data.train/tokens"] = "21";
    state.keys["eval.data/tokens"] = "19";
  });
  v1::Assign job = Job("a-1", 1, 2);
  job.mutable_spec()->mutable_eval()->add_data(folder_ / "held_out");
  Assign(job);
  EXPECT_THAT(AwaitEnd().message(), HasSubstr("sees 18 tokens in eval.data, rank 0 sees 19"));
}

TEST_F(WorkerAgentTest, CheckpointsAndSamplesAreReported) {
  training_.after_step = [](TrainObserver* observer, uint64_t step) {
    if (step != 5) return;
    v1::CheckpointRecord checkpoint;
    checkpoint.set_step(5);
    checkpoint.set_complete(true);
    observer->OnCheckpoint(checkpoint);
    v1::SampleRecord sample;
    sample.set_step(5);
    sample.set_text("caf\xc3\xa9 \xff!");  // a byte that is no character
    observer->OnSample(sample);
  };
  Assign(Job("a-1"));
  EXPECT_TRUE(AwaitEnd().completed());
  cluster_.With([](auto& state) {
    ASSERT_EQ(state.checkpoints.size(), 1u);
    EXPECT_EQ(state.checkpoints[0].step(), 5u);
    ASSERT_EQ(state.samples.size(), 1u);
    EXPECT_EQ(state.samples[0].text(), "caf\xc3\xa9 \xef\xbf\xbd!");
  });
}

TEST_F(WorkerAgentTest, AStopThatSavesEndsAfterTheCheckpointAndReportsItFirst) {
  v1::Assign job = SavingJob("a-1");
  TrainSlowly(&job);
  Assign(job);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return state.steps.size() >= 3; }));
  training_.on_save = [this](uint64_t) {
    // While it saves, heartbeats say so.
    EXPECT_TRUE(cluster_.Await(
        [](const auto& state) { return state.heartbeats.back().progress().phase() == "saving"; }));
    return absl::OkStatus();
  };
  StopRun("a-1", "writing a checkpoint before it is cancelled", /*save=*/true);
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.error_code(), "CANCELLED");
  EXPECT_FALSE(end.has_blamed_rank());
  cluster_.With([&](auto& state) {
    ASSERT_EQ(state.checkpoints.size(), 1u);
    const uint64_t step = state.checkpoints[0].step();
    EXPECT_EQ(end.message(), absl::StrCat("saved step ", step));
    EXPECT_EQ(state.steps.back().step(), step);
    EXPECT_EQ(state.barriers.count("saved"), 1u);
  });
  EXPECT_TRUE(AwaitIdle());
  EXPECT_EQ(training_.alive, 0);
}

TEST_F(WorkerAgentTest, APlainStopEndsASaveThatHangs) {
  v1::Assign job = SavingJob("a-1");
  TrainSlowly(&job);
  training_.on_save = [this](uint64_t) { return training_.WaitForAbort(); };
  Assign(job);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return !state.steps.empty(); }));
  StopRun("a-1", "writing a checkpoint before it is cancelled", /*save=*/true);
  ASSERT_TRUE(cluster_.Await(
      [](const auto& state) { return state.heartbeats.back().progress().phase() == "saving"; }));
  StopRun("a-1", "cancelled by a client");
  EXPECT_EQ(AwaitEnd().message(), "cancelled by a client");
  EXPECT_TRUE(AwaitIdle());
}

TEST_F(WorkerAgentTest, AWorkerThatIsToldToLeaveSavesAndBlamesItself) {
  v1::Assign job = SavingJob("a-1");
  TrainSlowly(&job);
  Assign(job);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return !state.steps.empty(); }));
  EXPECT_TRUE(agent_->Shutdown("told to leave (SIGTERM)", absl::Seconds(30), absl::Seconds(30)));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.error_code(), "CANCELLED");
  ASSERT_TRUE(end.has_blamed_rank());
  EXPECT_EQ(end.blamed_rank(), 0u);
  cluster_.With([&](auto& state) {
    ASSERT_EQ(state.checkpoints.size(), 1u);
    EXPECT_EQ(end.message(),
              absl::StrCat("told to leave (SIGTERM); saved step ", state.checkpoints[0].step()));
  });
}

TEST_F(WorkerAgentTest, ASaveThatTakesLongerThanTheGraceIsLeftAndSaid) {
  v1::Assign job = SavingJob("a-1");
  TrainSlowly(&job);
  training_.on_save = [this](uint64_t) { return training_.WaitForAbort(); };
  Assign(job);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return !state.steps.empty(); }));
  EXPECT_TRUE(
      agent_->Shutdown("told to leave (SIGTERM)", absl::Milliseconds(50), absl::Seconds(30)));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.message(), "told to leave (SIGTERM); no checkpoint was complete within 50ms");
  EXPECT_EQ(end.blamed_rank(), 0u);
}

// The others never come to the barrier at which all know that it is complete.
TEST_F(WorkerAgentTest, ARunThatIsStoppedAfterItSavedSaysWhatItSaved) {
  v1::Assign job = SavingJob("a-1");
  TrainSlowly(&job);
  Assign(job);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return !state.steps.empty(); }));
  cluster_.With([](auto& state) { state.world = 2; });
  StopRun("a-1", "writing a checkpoint", /*save=*/true);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return state.barriers.count("saved") > 0; }));
  StopRun("a-1", "stopping: rank 1 is gone");
  EXPECT_THAT(AwaitEnd().message(),
              testing::MatchesRegex("stopping: rank 1 is gone; saved step [0-9]+"));
}

TEST_F(WorkerAgentTest, AWorkerThatLeftWithACompleteCheckpointDoesNotSayThatThereIsNone) {
  v1::Assign job = SavingJob("a-1");
  TrainSlowly(&job);
  Assign(job);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return !state.steps.empty(); }));
  cluster_.With([](auto& state) { state.world = 2; });
  StopRun("a-1", "writing a checkpoint", /*save=*/true);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return state.barriers.count("saved") > 0; }));
  EXPECT_TRUE(
      agent_->Shutdown("told to leave (SIGTERM)", absl::Milliseconds(50), absl::Seconds(30)));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_THAT(end.message(),
              testing::MatchesRegex("told to leave \\(SIGTERM\\); the coordinator did not "
                                    "answer within 50ms; saved step [0-9]+"));
  EXPECT_EQ(end.blamed_rank(), 0u);
}

TEST_F(WorkerAgentTest, DataIsOpenedWithTheWorkersThreadsAndOneTokenizerForAll) {
  std::ofstream(folder_ / "held_out") << "text that is held out";
  std::vector<DatasetOptions> opened;
  training_.on_open = [&](const v1::DataSpec&, const DatasetOptions& options) {
    opened.push_back(options);
  };
  const Tokenizer* sampler = nullptr;
  training_.on_create = [&](const TrainerOptions& options) { sampler = options.tokenizer; };
  v1::Assign job = Job("a-1");
  job.mutable_spec()->mutable_eval()->add_data(folder_ / "held_out");
  job.mutable_spec()->mutable_sample()->add_prompts("Once");
  Assign(job);
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_TRUE(end.completed()) << end.message();
  ASSERT_EQ(opened.size(), 2u);
  for (const DatasetOptions& options : opened) EXPECT_EQ(options.threads, backend_.threads);
  ASSERT_NE(opened[0].tokenizer, nullptr);
  EXPECT_EQ(opened[0].tokenizer, opened[1].tokenizer);
  EXPECT_EQ(sampler, opened[0].tokenizer.get());
  EXPECT_EQ(opened[0].key, "data.train");
  EXPECT_EQ(opened[1].key, "eval.data");
}

TEST_F(WorkerAgentTest, TooLittleHeldOutTextIsSaidOfEvalDataAlone) {
  std::ofstream(folder_ / "held_out") << "abc";
  v1::Assign job = Job("a-1");
  job.mutable_spec()->mutable_eval()->add_data(folder_ / "held_out");
  Assign(job);
  EXPECT_THAT(AwaitEnd().message(), AllOf(HasSubstr("eval.data ("), HasSubstr("has 3"),
                                          testing::Not(HasSubstr("data.train"))));
}

TEST_F(WorkerAgentTest, AJobThatStillLoadsIsStoppedAtOnceWhenTheWorkerLeaves) {
  cluster_.With([](auto& state) { state.world = 2; });  // the other never comes
  v1::Assign job = SavingJob("a-1");
  job.set_world_size(2);
  Assign(job);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return state.barriers.count("start") > 0; }));
  EXPECT_TRUE(agent_->Shutdown("told to leave (SIGTERM)", absl::Hours(1), absl::Seconds(30)));
  EXPECT_EQ(AwaitEnd().message(), "told to leave (SIGTERM)");
}

TEST_F(WorkerAgentTest, AHostWhoseModelFolderSaysSomethingElseIsRefused) {
  const std::string model = folder_ / "model";
  std::filesystem::create_directory(model);
  const auto write_config = [&](int layers) {
    std::ofstream(model + "/config.json")
        << R"({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 256,
               "activation_function": "gelu_new", "n_layer": )"
        << layers << "}";
  };
  write_config(2);
  v1::Assign job = Job("a-1");
  job.mutable_spec()->mutable_model()->set_init_from(model);
  const auto resolved = ResolveInitFrom(job.mutable_spec());  // as the client does
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  ASSERT_EQ(job.spec().model().layers(), 2u);
  Assign(job);
  const v1::ReportEndRequest same = AwaitEnd();
  EXPECT_TRUE(same.completed()) << same.message();
  ASSERT_TRUE(AwaitIdle());
  write_config(3);
  job.set_run_id("a-2");
  Assign(job);
  const v1::ReportEndRequest end = AwaitEnd(2);
  EXPECT_EQ(end.error_code(), "INVALID_ARGUMENT");
  EXPECT_THAT(end.message(), AllOf(HasSubstr("host-a"), HasSubstr(model), HasSubstr("layers")));
}

TEST_F(WorkerAgentTest, DataThatChangesUnderTheJobFailsIt) {
  std::string ids((2 << 20) + 10, '\0');  // mapped; 5 tokens a sample
  std::ofstream(folder_ / "ids.bin") << ids;
  v1::Assign job = Job("a-1");
  job.mutable_spec()->mutable_data()->set_train(0, folder_ / "ids.bin");
  job.mutable_spec()->mutable_data()->set_tokenizer("tokens");
  training_.on_step = [this](uint64_t step) {
    if (step == 3) {
      std::fstream(folder_ / "ids.bin", std::ios::in | std::ios::out | std::ios::binary) << "\xff"
                                                                                         << "\xff";
    }
    return absl::OkStatus();
  };
  Assign(job);
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.error_code(), "DATA_LOSS");
  EXPECT_THAT(end.message(), HasSubstr("changed while it was used"));
  cluster_.With([](auto& state) { EXPECT_EQ(state.steps.size(), 3u); });
}

TEST_F(WorkerAgentTest, LeavingEndsTheJobAndSaysSo) {
  training_.on_step = [this](uint64_t) { return training_.WaitForAbort(); };
  Assign(Job("a-1"));
  ASSERT_TRUE(AwaitStep(1));
  EXPECT_TRUE(agent_->Shutdown("told to leave (SIGTERM)", absl::Seconds(30), absl::Seconds(30)));
  agent_->session()->Leave("told to leave (SIGTERM)", absl::Seconds(30));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.message(), "told to leave (SIGTERM)");
  EXPECT_EQ(end.error_code(), "CANCELLED");
  ASSERT_TRUE(end.has_blamed_rank());  // itself: it is the cause
  EXPECT_EQ(end.blamed_rank(), 0u);
  cluster_.With([](auto& state) { EXPECT_EQ(state.goodbyes.size(), 1u); });
  EXPECT_EQ(training_.alive, 0);
}

TEST_F(WorkerAgentTest, MetricsAppearWithTheJobAndVanishWithIt) {
  EXPECT_TRUE(metrics_.Collect().empty());
  training_.on_step = [this](uint64_t step) {
    return step < 3 ? absl::OkStatus() : training_.WaitForAbort();
  };
  Assign(Job("a-1"));
  ASSERT_TRUE(AwaitStep(3));
  double tokens = -1, parameters = -1;
  for (const prometheus::MetricFamily& family : metrics_.Collect()) {
    for (const prometheus::ClientMetric& metric : family.metric) {
      if (family.name == "zeroshard_worker_tokens_total") tokens = metric.counter.value;
      if (family.name == "zeroshard_worker_memory_bytes" &&
          metric.label.back().value == "parameters") {
        parameters = metric.gauge.value;
      }
    }
  }
  EXPECT_EQ(tokens, 20);
  EXPECT_EQ(parameters, 4096);
  StopRun("a-1", "enough");
  AwaitEnd();
  EXPECT_TRUE(AwaitIdle());
  EXPECT_TRUE(metrics_.Collect().empty());
}

}  // namespace
}  // namespace zeroshard
