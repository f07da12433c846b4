#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/exit_codes.h"
#include "common/net_address.h"
#include "common/spec/history_line.h"
#include "common/version.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/command_fixture.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;
using Json = nlohmann::json;

TEST_F(CommandTest, SubmitSendsTheCompleteJobWithAbsolutePaths) {
  const Outcome outcome = Run({"submit", job_, "--set", "steps=7", "--set", "data.train.2=../c"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_EQ(outcome.out, "tiny-1 submitted, QUEUED: waits for 2 workers\n");
  const v1::JobSpec& spec = fake_.submitted.spec();
  EXPECT_EQ(spec.steps(), 7u);
  EXPECT_EQ(spec.gradient_accumulation_steps(), 2u);
  EXPECT_THAT(spec.data().train(), ElementsAre((folder_ / "text.txt").string(), "/abs/b",
                                               (folder_.parent_path() / "c").string()));
}

TEST_F(CommandTest, OutputThatCannotBeWrittenIsAnError) {
  std::ofstream full("/dev/full");
  ASSERT_TRUE(full.is_open());
  std::ostringstream err;
  Environment env;
  env.out = &full;
  env.err = &err;
  env.coordinator = fake_.address();
  EXPECT_EQ(RunClient({"list"}, env), kExitFailed);
  EXPECT_THAT(err.str(), HasSubstr("could not be written"));
}

TEST_F(CommandTest, SubmitAnswersInJson) {
  const Outcome outcome = Run({"submit", job_, "--output", "json"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  const Json json = Json::parse(outcome.out);
  EXPECT_EQ(json["run_id"], "tiny-1");
  EXPECT_EQ(json["status"]["state"], "QUEUED");
  EXPECT_TRUE(json["status"]["steps"].is_number());
}

TEST_F(CommandTest, SubmitOfABadFileNamesTheLineAndAsksNobody) {
  Write(job_, absl::StrCat(kJob, "gradient_clipp1ng: 1.0\n"));
  const Outcome outcome = Run({"submit", job_, "--coordinator", "127.0.0.1:1"});
  EXPECT_EQ(outcome.code, kExitUsage);
  ExpectOneMessage(outcome);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr(absl::StrCat(job_, ":8:1: gradient_clipp1ng")),
                                 HasSubstr("did you mean gradient_clipping?")));
}

TEST_F(CommandTest, SubmitOfAMissingFileSaysSo) {
  const Outcome outcome = Run({"submit", (folder_ / "nope.yaml").string()});
  EXPECT_EQ(outcome.code, kExitNotFound);
  ExpectOneMessage(outcome);
  EXPECT_THAT(outcome.err, HasSubstr("nope.yaml: no such file"));
  EXPECT_EQ(Run({"submit", folder_.string()}).code, kExitUsage);
}

TEST_F(CommandTest, SubmitPassesOnWhatTheCoordinatorRefuses) {
  fake_.submit_error = {grpc::StatusCode::ALREADY_EXISTS, "tiny-1 is still RUNNING; cancel it"};
  const Outcome outcome = Run({"submit", job_});
  EXPECT_EQ(outcome.code, kExitConflict);
  EXPECT_EQ(outcome.err, "zeroshard: tiny-1 is still RUNNING; cancel it\n");
}

TEST_F(CommandTest, SubmitWaitSucceedsOnlyIfTheJobCompleted) {
  v1::JobStatus done = Job("tiny", v1::JOB_STATE_COMPLETED, "all 2 steps done");
  *done.mutable_first() = Step(1, 5.5);
  *done.mutable_last() = Step(2, 2.25);
  fake_.AddWatch(done, {Step(1, 5.5), Step(2, 2.25)});
  Outcome outcome = Run({"submit", job_, "--wait"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("step 2/2  loss 2.2500  8,192 tokens/s"),
                                 HasSubstr("tiny-1 COMPLETED: all 2 steps done"),
                                 HasSubstr("loss 5.5000 at step 1, 2.2500 at step 2")));
  EXPECT_THAT(outcome.err, IsEmpty());

  fake_.AddWatch(Job("tiny", v1::JOB_STATE_FAILED, "rank 1 on host-b: killed by signal 9"), {});
  outcome = Run({"submit", job_, "--wait"});
  EXPECT_EQ(outcome.code, kExitFailed);
  EXPECT_EQ(outcome.err, "zeroshard: tiny-1 FAILED: rank 1 on host-b: killed by signal 9\n");
}

TEST_F(CommandTest, WatchOfACancelledJobFails) {
  fake_.jobs = {Job("tiny", v1::JOB_STATE_CANCELLED, "by a user")};
  fake_.AddWatch(fake_.jobs[0], {});
  const Outcome outcome = Run({"watch", "tiny"});
  EXPECT_EQ(outcome.code, kExitFailed);
  EXPECT_EQ(outcome.err, "zeroshard: tiny-1 CANCELLED: by a user\n");
}

TEST_F(CommandTest, WatchGoesOnAfterTheCoordinatorWasAwayAndShowsEachStepOnce) {
  fake_.jobs = {Job("tiny", v1::JOB_STATE_RUNNING, "2 ranks started")};
  fake_.AddWatch(fake_.jobs[0], {Step(1, 5)}, {grpc::StatusCode::UNAVAILABLE, "socket closed"});
  fake_.AddWatch(Job("tiny", v1::JOB_STATE_COMPLETED, "done"), {Step(1, 5), Step(2, 4)});
  const Outcome outcome = Run({"watch", "tiny", "--output", "json"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  std::vector<uint64_t> steps;
  for (const auto line : absl::StrSplit(outcome.out, '\n', absl::SkipEmpty())) {
    const Json json = Json::parse(line);
    for (const Json& record : json["records"]) steps.push_back(record["step"]);
  }
  EXPECT_THAT(steps, ElementsAre(1, 2));
  ASSERT_EQ(fake_.watch_requests.size(), 2u);
  EXPECT_EQ(fake_.watch_requests[0].job(), "tiny");
  EXPECT_EQ(fake_.watch_requests[1].job(), "tiny-1");
  EXPECT_EQ(fake_.watch_requests[1].after_step(), 1u);
}

TEST_F(CommandTest, WatchAndHistoryShowWhatARollBackCost) {
  fake_.jobs = {Job("tiny", v1::JOB_STATE_RUNNING, "")};
  v1::JobStatus done = Job("tiny", v1::JOB_STATE_COMPLETED, "");
  done.set_steps_lost(3);
  v1::StepRecord told = Step(2, 4);
  told.set_steps_lost(3);
  fake_.AddWatch(done, {Step(1, 5), told});
  fake_.history = {Step(1, 5), told};
  EXPECT_THAT(Run({"watch", "tiny"}).out, HasSubstr("8,192 tokens/s  3 steps lost\n"));
  EXPECT_THAT(Run({"history", "tiny"}).out, HasSubstr("\"tokens\":4096,\"steps_lost\":3,"));
}

TEST_F(CommandTest, WatchSaysThatTheCoordinatorIsAway) {
  fake_.jobs = {Job("tiny", v1::JOB_STATE_RUNNING, "")};
  fake_.AddWatch(fake_.jobs[0], {}, {grpc::StatusCode::UNAVAILABLE, "socket closed"});
  fake_.AddWatch(Job("tiny", v1::JOB_STATE_COMPLETED, ""), {Step(1, 5)});
  const Outcome outcome = Run({"watch", "tiny"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("the coordinator is away"),
                                 HasSubstr("the coordinator answers again")));
}

TEST_F(CommandTest, WatchRedrawsItsLineOnATerminal) {
  terminal_ = true;
  fake_.jobs = {Job("tiny", v1::JOB_STATE_RUNNING, "")};
  fake_.AddWatch(fake_.jobs[0], {Step(1, 5)}, {grpc::StatusCode::UNAVAILABLE, ""});
  fake_.AddWatch(Job("tiny", v1::JOB_STATE_COMPLETED, ""), {Step(2, 4)});
  const Outcome outcome = Run({"watch", "tiny"});
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_THAT(outcome.out, HasSubstr("step 1/2  loss 5.0000  8,192 tokens/s  1 s left\r\033[K"));
}

TEST_F(CommandTest, UnknownJobsAreNamedWithTheJobsThereAre) {
  for (const char* command : {"status", "watch", "cancel", "history"}) {
    const Outcome outcome = Run({command, "nope"});
    EXPECT_EQ(outcome.code, kExitNotFound) << command;
    EXPECT_EQ(outcome.err, "zeroshard: no job nope; there are licences\n") << command;
    EXPECT_THAT(outcome.out, IsEmpty());
  }
}

TEST_F(CommandTest, EveryRemoteCommandSaysThatNoCoordinatorAnswers) {
  // A port that was free a moment ago, and that nobody serves.
  std::string nobody;
  {
    const FakeJobs gone;
    nobody = gone.address();
  }
  const std::vector<std::vector<std::string>> commands = {
      {"submit", job_}, {"list"},      {"status", "a"}, {"watch", "a"},
      {"history", "a"}, {"logs", "a"}, {"cancel", "a"}, {"nodes"}};
  for (std::vector<std::string> command : commands) {
    command.insert(command.end(), {"--coordinator", nobody, "--timeout", "5"});
    const Outcome outcome = Run(command);
    EXPECT_EQ(outcome.code, kExitUnavailable) << command[0];
    ExpectOneMessage(outcome);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr(absl::StrCat("no coordinator answers at ", nobody)),
                                   HasSubstr("zeroshard-coordinator"), HasSubstr("--coordinator")));
  }
}

TEST_F(CommandTest, ABadAddressIsRefused) {
  for (const char* address : {"here", "127.0.0.1:0", "127.0.0.1:x", ""}) {
    const Outcome outcome = Run({"list", "--coordinator", address});
    EXPECT_EQ(outcome.code, kExitUsage) << address;
    EXPECT_THAT(outcome.err, HasSubstr("wanted host:port")) << address;
  }
}

TEST_F(CommandTest, AnEmptyNameOfAFileOfTlsIsRefused) {
  for (const char* option : {"--tls-cert", "--tls-key", "--tls-ca", "--token-file"}) {
    const Outcome outcome = Run({"list", option, ""});
    EXPECT_EQ(outcome.code, kExitUsage) << option;
    ExpectOneMessage(outcome);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr(option), HasSubstr("seen no name"))) << option;
  }
}

TEST_F(CommandTest, ListShowsJobsAsTextAndJson) {
  EXPECT_THAT(Run({"list"}).out, HasSubstr("no jobs yet"));
  fake_.jobs = {Job("a", v1::JOB_STATE_COMPLETED, "done"), Job("b", v1::JOB_STATE_QUEUED, "waits")};
  *fake_.jobs[0].mutable_last() = Step(2, 2.5);
  fake_.jobs[0].set_committed_step(2);
  EXPECT_EQ(Run({"list"}).out,
            "NAME  RUN  STATE      STEP  LOSS    REASON\n"
            "a     a-1  COMPLETED  2/2   2.5000  done\n"
            "b     b-1  QUEUED     0/2   -       waits\n");
  const Json json = Json::parse(Run({"list", "--output", "json"}).out);
  ASSERT_EQ(json["jobs"].size(), 2u);
  EXPECT_EQ(json["jobs"][1]["name"], "b");
  EXPECT_EQ(json["jobs"][0]["last"]["loss"], 2.5);
}

TEST_F(CommandTest, StatusShowsRanksPlanAndEvents) {
  v1::JobStatus job = Job("a", v1::JOB_STATE_FAILED, "rank 1 on host-b was killed by signal 9");
  v1::RankStatus* rank = job.add_ranks();
  rank->set_rank(1);
  rank->set_member("worker-1");
  rank->set_host("host-b");
  rank->mutable_progress()->set_phase("backward");
  v1::ShardPlan* plan = job.add_plan();
  plan->set_owned_parameters(406144);
  plan->set_optimizer_bytes(4873728);
  v1::JobEvent* event = job.add_events();
  event->set_state(v1::JOB_STATE_RUNNING);
  event->set_reason("2 ranks started");
  fake_.jobs = {job};
  const Outcome text = Run({"status", "a"});
  EXPECT_EQ(text.code, kExitOk);
  EXPECT_THAT(text.out, AllOf(HasSubstr("FAILED: rank 1 on host-b was killed by signal 9"),
                              HasSubstr("worker-1"), HasSubstr("backward"), HasSubstr("406,144"),
                              HasSubstr("4.87 MB"), HasSubstr("RUNNING  2 ranks started")));
  const Json json = Json::parse(Run({"status", "a", "--output", "json"}).out);
  EXPECT_EQ(json["ranks"][0]["host"], "host-b");
  EXPECT_EQ(json["events"][0]["state"], "RUNNING");
}

TEST_F(CommandTest, StatusDrawsTheMesh) {
  v1::JobStatus job = Job("a", v1::JOB_STATE_RUNNING, "");
  job.mutable_mesh()->set_pipeline(2);
  job.mutable_mesh()->set_data(5);
  job.mutable_mesh()->set_tensor(2);
  job.set_placement("each of 10 tensor groups is on one host");
  for (uint32_t r = 0; r < 20; ++r) {
    v1::RankStatus* rank = job.add_ranks();
    rank->set_rank(r);
    rank->set_member(absl::StrCat("w", r));
    rank->set_host(absl::StrCat("h", r / 2));
    rank->mutable_position()->set_pipeline(r / 10);
    rank->mutable_position()->set_data(r / 2 % 5);
    rank->mutable_position()->set_tensor(r % 2);
  }
  fake_.jobs = {job};
  const std::string text = Run({"status", "a"}).out;
  EXPECT_THAT(text, HasSubstr("pipeline 2 x data 5 x tensor 2; each of 10 tensor groups"));
  EXPECT_THAT(text,
              HasSubstr("STAGE  TENSOR  DATA 0         DATA 1         DATA 2         DATA 3\n"
                        "0      0       0: w0 on h0    2: w2 on h1    4: w4 on h2    6: w6 on "
                        "h3\n"
                        "       1       1: w1 on h0    3: w3 on h1    5: w5 on h2    7: w7 on "
                        "h3\n"
                        "1      0       10: w10 on h5  12: w12 on h6"));
  EXPECT_THAT(text, HasSubstr("STAGE  TENSOR  DATA 4\n0      0       8: w8 on h4\n"));
  const Json json = Json::parse(Run({"status", "a", "--output", "json"}).out);
  EXPECT_EQ(json["mesh"]["data"], 5);
  EXPECT_EQ(json["ranks"][19]["position"]["pipeline"], 1);
  EXPECT_EQ(json["ranks"][19]["position"]["data"], 4);
  // What is not the size that it says is not drawn.
  fake_.jobs[0].mutable_mesh()->set_data(4'000'000'000);
  EXPECT_THAT(Run({"status", "a"}).out, Not(HasSubstr("STAGE  TENSOR")));
  fake_.jobs[0].mutable_mesh()->set_data(20);
  fake_.jobs[0].mutable_mesh()->set_pipeline(1);
  fake_.jobs[0].mutable_mesh()->set_tensor(1);
  EXPECT_THAT(Run({"status", "a"}).out, Not(HasSubstr("mesh")));
}

TEST_F(CommandTest, SubmitSaysTheMesh) {
  const Outcome plain = Run({"submit", job_});
  EXPECT_THAT(plain.out, Not(HasSubstr("mesh")));
  const std::vector<std::string> mesh = {
      "--set", "resources.workers=4", "--set", "parallel={tensor: 2, pipeline: 2}",
      "--set", "train_batch_size=12", "--set", "train_micro_batch_size_per_gpu=4"};
  std::vector<std::string> submit = {"submit", job_}, validate = {"validate", job_};
  submit.insert(submit.end(), mesh.begin(), mesh.end());
  validate.insert(validate.end(), mesh.begin(), mesh.end());
  // Of 3 micro-batches through 2 stages: 1 / (3 + 1).
  const char* const words =
      "mesh: pipeline 2 x data 1 x tensor 2; 3 micro-batches of a rank and step through 2 stages "
      "leave it idle for 25 %\n";
  const Outcome outcome = Run(submit);
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr(words));
  EXPECT_EQ(fake_.submitted.spec().parallel().pipeline(), 2u);
  EXPECT_THAT(Run(validate).out, HasSubstr(absl::StrCat("# ", words)));
}

TEST_F(CommandTest, StatusShowsWhatWasPlannedAndWhatWasMeasured) {
  v1::JobStatus job = Job("a", v1::JOB_STATE_RUNNING, "");
  for (uint32_t r = 0; r < 2; ++r) {
    v1::ShardPlan* plan = job.add_plan();
    plan->set_rank(r);
    plan->set_parameter_bytes(2'000'000);
    plan->set_optimizer_bytes(4'000'000);
    plan->set_traffic_bytes_per_step(8'000'000);
  }
  v1::RankStatus* rank = job.add_ranks();
  rank->set_rank(1);
  v1::RankUsage* usage = rank->mutable_usage();
  usage->set_parameter_bytes(2'000'000);
  usage->set_gradient_bytes(10);
  usage->set_optimizer_bytes(4'100'000);
  usage->set_step(7);
  usage->set_traffic_bytes(8'000'000);
  fake_.jobs = {job};
  const std::string text = Run({"status", "a"}).out;
  EXPECT_THAT(text, HasSubstr("measured  2 MB        10 B (not 0)  4.1 MB (+2.5 %)  0 B"));
  EXPECT_THAT(text, HasSubstr("8 MB\n"));
  // Rank 0 said nothing of itself.
  EXPECT_EQ(text.find("measured"), text.rfind("measured"));
  const Json json = Json::parse(Run({"status", "a", "--output", "json"}).out);
  EXPECT_EQ(json["ranks"][0]["usage"]["optimizer_bytes"], 4'100'000);
  EXPECT_EQ(json["plan"][1]["optimizer_bytes"], 4'000'000);
  // No step was measured yet.
  fake_.jobs[0].mutable_ranks(0)->mutable_usage()->set_step(0);
  EXPECT_THAT(Run({"status", "a"}).out,
              AllOf(HasSubstr("0 B          -\n"), HasSubstr("\n-: not measured yet")));
  EXPECT_THAT(text, Not(HasSubstr("not measured yet")));
}

TEST_F(CommandTest, SubmitForcesOnlyWhereAsked) {
  EXPECT_EQ(Run({"submit", job_}).code, kExitOk);
  EXPECT_FALSE(fake_.submitted.force());
  EXPECT_EQ(Run({"submit", job_, "--force"}).code, kExitOk);
  EXPECT_TRUE(fake_.submitted.force());
  fake_.submit_error = {grpc::StatusCode::RESOURCE_EXHAUSTED, "does not fit"};
  const Outcome refused = Run({"submit", job_});
  EXPECT_EQ(refused.code, kExitDoesNotFit);
  EXPECT_EQ(refused.err, "zeroshard: does not fit\n");
}

TEST_F(CommandTest, HistoryPrintsTheLinesOfTheFile) {
  fake_.jobs = {Job("a", v1::JOB_STATE_COMPLETED, "")};
  fake_.history = {Step(1, 0.1), Step(2, 1.0 / 3)};
  const std::string wanted = absl::StrCat(FormatHistoryLine(Step(1, 0.1)), "\n",
                                          FormatHistoryLine(Step(2, 1.0 / 3)), "\n");
  EXPECT_EQ(Run({"history", "a"}).out, wanted);
  EXPECT_EQ(Run({"history", "a", "--output", "json"}).out, wanted);
}

TEST_F(CommandTest, LogsNameTheRankOfEachLineHoweverChunksEnd) {
  const auto chunk = [](uint32_t rank, const std::string& text) {
    v1::LogChunk chunk;
    chunk.set_rank(rank);
    chunk.set_text(text);
    return chunk;
  };
  fake_.logs = {chunk(0, "one\ntw"), chunk(1, "other\n"), chunk(0, "o\nend")};
  EXPECT_EQ(Run({"logs", "a"}).out, "rank 0: one\nrank 1: other\nrank 0: two\nrank 0: end\n");
  EXPECT_EQ(Run({"logs", "a", "--rank", "1"}).out, "other\n");
  for (const auto line :
       absl::StrSplit(Run({"logs", "a", "--output", "json"}).out, '\n', absl::SkipEmpty())) {
    EXPECT_TRUE(Json::parse(line)["text"].is_string());
  }
}

TEST_F(CommandTest, CancelShowsTheNewState) {
  fake_.jobs = {Job("a", v1::JOB_STATE_RUNNING, "by a user")};
  EXPECT_EQ(Run({"cancel", "a"}).out, "a-1 CANCELLED: by a user\n");
  EXPECT_EQ(Json::parse(Run({"cancel", "a", "--output", "json"}).out)["state"], "CANCELLED");
}

TEST_F(CommandTest, NodesShowsMembers) {
  EXPECT_THAT(Run({"nodes"}).out, HasSubstr("no members yet"));
  v1::Node node;
  node.mutable_hello()->set_name("store-0");
  node.mutable_hello()->set_kind(v1::MEMBER_KIND_STORE);
  node.mutable_hello()->set_memory_bytes(64'000'000'000);
  node.set_state("idle");
  fake_.nodes = {node};
  EXPECT_THAT(Run({"nodes"}).out, AllOf(HasSubstr("store-0  store  idle"), HasSubstr("64 GB")));
  const Json json = Json::parse(Run({"nodes", "--output", "json"}).out);
  EXPECT_EQ(json["nodes"][0]["hello"]["kind"], "STORE");
}

TEST_F(CommandTest, NodesShowsWhatStoresHaveAndWhatIsReserved) {
  v1::Node node;
  node.mutable_hello()->set_name("store-0");
  node.mutable_hello()->set_kind(v1::MEMBER_KIND_STORE);
  node.mutable_hello()->set_memory_bytes(64'000'000'000);
  node.mutable_hello()->set_nvme_bytes(2'000'000'000'000);
  node.set_state("running");
  node.set_reserved_bytes(12'500'000'000);
  node.set_reserved_nvme_bytes(300'000'000'000);
  node.set_jobs(2);
  node.set_chunks(37);
  node.set_held_bytes(11'000'000'000);
  node.set_held_nvme_bytes(280'000'000'000);
  fake_.nodes = {node};
  EXPECT_THAT(Run({"nodes"}).out,
              AllOf(HasSubstr("RESERVED"), HasSubstr("2 jobs"), HasSubstr("64 GB"),
                    HasSubstr("12.5 GB"), HasSubstr("300 GB of 2 TB"), HasSubstr("CHUNKS"),
                    HasSubstr("37"), HasSubstr("11 GB, 280 GB on disk")));
  const Json json = Json::parse(Run({"nodes", "--output", "json"}).out);
  EXPECT_EQ(json["nodes"][0]["reserved_bytes"], 12'500'000'000);
  EXPECT_EQ(json["nodes"][0]["reserved_nvme_bytes"], 300'000'000'000);
  EXPECT_EQ(json["nodes"][0]["jobs"], 2);
  EXPECT_EQ(json["nodes"][0]["chunks"], 37);
}

TEST_F(CommandTest, StatusShowsWhereTheChunksOfAnOffloadedJobAre) {
  v1::JobStatus job = Job("big", v1::JOB_STATE_RECOVERING, "store-1 is gone");
  job.mutable_version()->set_epoch(3);
  job.mutable_version()->set_step(57);
  job.set_steps_lost(7);
  job.mutable_store_plan()->set_chunks(12);
  job.mutable_store_plan()->set_state_bytes(170'000'000);
  job.mutable_store_plan()->set_staging_bytes(24'000'000);
  job.mutable_store_plan()->set_replicas(2);
  v1::StoreStatus& store = *job.add_stores();
  store.set_member("store-0");
  store.set_host("host-a");
  store.set_phase(v1::STORE_PHASE_APPLYING);
  store.mutable_version()->set_epoch(3);
  store.mutable_version()->set_step(56);
  store.set_generation(4);
  store.mutable_usage()->set_chunks(9);
  store.mutable_usage()->set_master_bytes(36'000'000);
  store.mutable_usage()->set_staging_bytes(18'000'000);
  v1::StoreStatus& failed = *job.add_stores();
  failed.set_member("store-1");
  failed.set_phase(v1::STORE_PHASE_FAILED);
  failed.set_problem("chunk 4 is damaged");
  v1::ShardPlan& plan = *job.add_plan();
  plan.set_push_bytes_per_step(48'000'000);
  plan.set_pull_bytes_per_step(25'000'000);
  fake_.jobs = {job};

  const std::string text = Run({"status", "big"}).out;
  EXPECT_THAT(text, AllOf(HasSubstr("170 MB in 12 chunks, and 24 MB for gradients, 2 times"),
                          HasSubstr("step 57 of epoch 3"), HasSubstr("steps lost  7")));
  EXPECT_THAT(
      text, AllOf(HasSubstr("host-a"), HasSubstr("APPLYING"), HasSubstr("3.56"), HasSubstr("36 MB"),
                  HasSubstr("18 MB"), HasSubstr("FAILED"), HasSubstr("chunk 4 is damaged")));
  EXPECT_THAT(text, AllOf(HasSubstr("PUSH/STEP"), HasSubstr("48 MB"), HasSubstr("25 MB")));

  const Json json = Json::parse(Run({"status", "big", "--output", "json"}).out);
  EXPECT_EQ(json["version"]["step"], 57);
  EXPECT_EQ(json["steps_lost"], 7);
  EXPECT_EQ(json["stores"][0]["phase"], "APPLYING");
  EXPECT_EQ(json["stores"][0]["usage"]["chunks"], 9);
  EXPECT_EQ(json["stores"][1]["problem"], "chunk 4 is damaged");
  EXPECT_EQ(json["store_plan"]["replicas"], 2);
}

TEST_F(CommandTest, StatusOfAJobThatKeepsItsOwnStateSaysNothingOfStores) {
  v1::JobStatus job = Job("a", v1::JOB_STATE_RUNNING, "");
  job.add_plan();
  fake_.jobs = {job};
  EXPECT_THAT(Run({"status", "a"}).out,
              AllOf(Not(HasSubstr("epoch")), Not(HasSubstr("STORE")), Not(HasSubstr("PUSH"))));
}

TEST_F(CommandTest, VersionNeedsNoCoordinator) {
  EXPECT_THAT(Run({"version"}).out, AllOf(HasSubstr(kVersion), HasSubstr("9.8.7")));
  std::string nobody;
  {
    const FakeJobs gone;
    nobody = gone.address();
  }
  const Outcome outcome = Run({"version", "--output", "json", "--coordinator", nobody});
  EXPECT_EQ(outcome.code, kExitOk);
  const Json json = Json::parse(outcome.out);
  EXPECT_EQ(json["version"], kVersion);
  EXPECT_TRUE(json["coordinator"].is_null());
}

// An element has 12 bytes of state and 2 of parameters; a step's gradients have 2 more.
TEST_F(CommandTest, ValidateSaysWhatTheStoresHoldAndWhatTravels) {
  const std::vector<std::string> offload = {
      "--set", "zero_optimization.stage=2",
      "--set", "zero_optimization.offload_optimizer.device=cpu",
      "--set", "bf16.enabled=true",
      "--set", "store.replicas=2"};
  std::vector<std::string> args = {"validate", job_};
  args.insert(args.end(), offload.begin(), offload.end());
  const Outcome text = Run(args);
  EXPECT_EQ(text.code, kExitOk) << text.err;
  EXPECT_THAT(text.out, AllOf(HasSubstr("# the shard stores hold "), HasSubstr("2 times"),
                              HasSubstr("in a step\n")));
  args.insert(args.end(), {"--output", "json"});
  const Json json = Json::parse(Run(args).out);
  const uint64_t state = json["store_plan"]["state_bytes"];
  const uint64_t staging = json["store_plan"]["staging_bytes"];
  EXPECT_EQ(state, staging * 7);  // 14 bytes an element beside 2
  uint64_t pushed = 0;
  for (const Json& rank : json["plan"]) pushed += rank["push_bytes_per_step"].get<uint64_t>();
  EXPECT_EQ(pushed, 2 * staging);  // every gradient to both copies
  EXPECT_EQ(json["plan"].size(), 2u);

  const Outcome without = Run({"validate", job_, "--output", "json"});
  EXPECT_FALSE(Json::parse(without.out).contains("store_plan"));
  EXPECT_THAT(Run({"validate", job_}).out, Not(HasSubstr("shard stores hold")));
}

TEST_F(CommandTest, ValidatePrintsASpecificationThatValidatesAgain) {
  Outcome outcome = Run({"validate", job_});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("4 micro-batches and 128 tokens a step"));
  EXPECT_THAT(outcome.err, HasSubstr("text.txt"));  // it is not here, which is worth a note
  const std::string again = (folder_ / "again.yaml").string();
  Write(again, outcome.out);
  EXPECT_EQ(Run({"validate", again}).out, outcome.out);

  outcome = Run({"validate", job_, "--output", "json"});
  const Json json = Json::parse(outcome.out);
  EXPECT_EQ(json["micro_batches_per_step"], 4);
  EXPECT_EQ(json["spec"]["train_batch_size"], 8);
  EXPECT_EQ(Run({"validate", job_, "--set", "steps=0"}).code, kExitUsage);
}

TEST_F(CommandTest, MisuseIsOneLineWithAWayOn) {
  const std::vector<std::vector<std::string>> lines = {{},
                                                       {"bogus"},
                                                       {"status"},
                                                       {"list", "--output", "xml"},
                                                       {"list", "--nope"},
                                                       {"submit", job_, "--timeout", "0"},
                                                       {"local", job_, "--workers", "0"}};
  for (const auto& line : lines) {
    const Outcome outcome = Run(line);
    EXPECT_EQ(outcome.code, kExitUsage);
    ExpectOneMessage(outcome);
  }
  EXPECT_THAT(Run({"stauts", "a"}).err, HasSubstr("did you mean status?"));
}

TEST_F(CommandTest, HelpIsNoError) {
  const Outcome outcome = Run({"--help"});
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_THAT(outcome.out, HasSubstr("submit"));
  EXPECT_EQ(Run({"local", "--help"}).code, kExitOk);
}

TEST_F(CommandTest, LocalRefusesMissingDataBeforeItStartsAnything) {
  const Outcome outcome = Run({"local", job_, "--workdir", (folder_ / "w").string()});
  EXPECT_EQ(outcome.code, kExitNotFound);
  ExpectOneMessage(outcome);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("data.train.0"), HasSubstr("text.txt")));
  EXPECT_FALSE(fs::exists(folder_ / "w"));
}

TEST_F(CommandTest, LocalSaysWhereItLookedForTheDaemons) {
  Write((folder_ / "text.txt").string(), "text");
  const Outcome outcome =
      Run({"local", job_, "--set", "data.train=[text.txt]", "--workdir", (folder_ / "w").string()});
  EXPECT_EQ(outcome.code, kExitNotFound);
  ExpectOneMessage(outcome);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("zeroshard-coordinator"), HasSubstr("--bin-dir"),
                                 HasSubstr((folder_ / "bin").string())));
}

TEST_F(CommandTest, LocalWithANumberOfWorkersChangesTheWholeJobsSize) {
  Write((folder_ / "text.txt").string(), "text");
  std::string job = kJob;
  const std::string workers = "{workers: 2}";
  job.replace(job.find(workers), workers.size(), "{workers: 2, min_workers: 2}");
  Write(job_, job);
  for (const char* more : {"resources.workers=1", "steps=2"}) {
    const Outcome outcome = Run({"local", job_, "--workers", "3", "--set", "data.train=[text.txt]",
                                 "--set", more, "--workdir", (folder_ / "w").string()});
    EXPECT_EQ(outcome.code, kExitNotFound) << outcome.err;  // it gets as far as the daemons
    EXPECT_THAT(outcome.err, HasSubstr("zeroshard-coordinator"));
  }
}

TEST_F(CommandTest, LocalRefusesAJobThatWantsMoreWorkers) {
  Write((folder_ / "text.txt").string(), "text");
  const Outcome outcome = Run({"local", job_, "--workers", "1", "--set", "resources.workers=2",
                               "--set", "data.train=[text.txt]"});
  EXPECT_EQ(outcome.code, kExitUsage);
  EXPECT_THAT(outcome.err, HasSubstr("the job wants 2 workers, --workers starts 1"));
}

}  // namespace
}  // namespace zeroshard
