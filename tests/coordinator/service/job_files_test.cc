#include "coordinator/service/job_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "tests/common/temp_folder.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::HasSubstr;

v1::StepRecord Record(uint64_t step, double loss) {
  v1::StepRecord record;
  record.set_step(step);
  record.set_loss(loss);
  record.set_grad_norm(0.5);
  record.set_learning_rate(0.001);
  record.set_tokens(4096);
  record.set_seconds(0.25);
  return record;
}

constexpr char kLine1[] =
    "{\"step\":1,\"loss\":0.1,\"grad_norm\":0.5,\"learning_rate\":0.001,\"tokens\":4096,"
    "\"seconds\":0.25}\n";

class JobFilesTest : public ::testing::Test {
 protected:
  JobFilesTest() : files(folder.path()) { EXPECT_TRUE(files.Prepare("a", "a-1").ok()); }
  std::string HistoryPath() const { return folder / "jobs/a/history.jsonl"; }
  void Append(uint64_t from, uint64_t to) {
    std::vector<v1::StepRecord> records;
    for (uint64_t step = from; step <= to; ++step) records.push_back(Record(step, 1.0 / step));
    ASSERT_TRUE(files.AppendHistory("a", "a-1", records).ok());
  }

  TempFolder folder;
  JobFiles files;
};

TEST_F(JobFilesTest, AStepIsOneLineWithTheSixKeysInShortestForm) {
  ASSERT_TRUE(files.AppendHistory("a", "a-1", {Record(1, 0.1)}).ok());
  EXPECT_EQ(Contents(HistoryPath()), kLine1);
}

TEST_F(JobFilesTest, WhatWasWrittenIsReadBackToTheLastBit) {
  const double loss = 0.1 + 0.2;
  ASSERT_TRUE(files.AppendHistory("a", "a-1", {Record(1, loss)}).ok());
  HistoryReader reader(HistoryPath());
  const auto records = reader.Next(10);
  ASSERT_TRUE(records.ok());
  ASSERT_EQ(records->size(), 1u);
  EXPECT_EQ(records->front().loss(), loss);
  EXPECT_EQ(records->front().tokens(), 4096u);
}

TEST_F(JobFilesTest, AReaderFollowsAFileThatGrowsAndNeverSeesHalfALine) {
  HistoryReader reader(HistoryPath());
  EXPECT_TRUE(reader.Next(10)->empty());
  Append(1, 3);
  EXPECT_EQ(reader.Next(2)->size(), 2u);
  std::ofstream(HistoryPath(), std::ios::app) << "{\"step\":4,\"lo";
  const auto rest = reader.Next(10);
  ASSERT_EQ(rest->size(), 1u);
  EXPECT_EQ(rest->front().step(), 3u);
}

TEST_F(JobFilesTest, ATornLastLineIsCut) {
  Append(1, 3);
  const std::string whole = Contents(HistoryPath());
  std::ofstream(HistoryPath(), std::ios::app) << "{\"step\":4,\"lo";
  const auto ends = files.Recover("jobs/a", /*repair=*/true);
  ASSERT_TRUE(ends.ok()) << ends.status();
  EXPECT_EQ(ends->first.step(), 1u);
  EXPECT_EQ(ends->last.step(), 3u);
  EXPECT_THAT(ends->warning, HasSubstr("torn last line"));
  EXPECT_EQ(Contents(HistoryPath()), whole);
}

TEST_F(JobFilesTest, DamageInTheMiddleKeepsTheWholeFileAside) {
  Append(1, 2);
  std::ofstream(HistoryPath(), std::ios::app) << "garbage\n";
  Append(3, 4);
  const std::string damaged = Contents(HistoryPath());
  const auto ends = files.Recover("jobs/a", true);
  ASSERT_TRUE(ends.ok());
  EXPECT_EQ(ends->last.step(), 2u);
  EXPECT_THAT(ends->warning, HasSubstr("damaged after line 2"));
  EXPECT_EQ(Contents(HistoryPath() + ".damaged"), damaged);
}

TEST_F(JobFilesTest, AnEndedRunsHistoryIsReadAndLeftAlone) {
  Append(1, 2);
  std::ofstream(HistoryPath(), std::ios::app) << "{\"step\"";
  const std::string before = Contents(HistoryPath());
  EXPECT_EQ(files.Recover("jobs/a", false)->last.step(), 2u);
  EXPECT_EQ(Contents(HistoryPath()), before);
}

TEST_F(JobFilesTest, ALongHistoryIsReadInPieces) {
  Append(1, 20000);
  EXPECT_EQ(files.Recover("jobs/a", true)->last.step(), 20000u);
  HistoryReader reader(HistoryPath());
  size_t count = 0;
  for (size_t got; (got = reader.Next(500)->size()) > 0; count += got) ASSERT_LE(got, 500u);
  EXPECT_EQ(count, 20000u);
}

TEST_F(JobFilesTest, ANameSubmittedAgainMovesTheOldFolderAside) {
  Append(1, 1);
  ASSERT_TRUE(files.Prepare("a", "a-2").ok());
  ASSERT_TRUE(files.Prepare("a", "a-2").ok());  // again, after a restart
  EXPECT_FALSE(std::filesystem::exists(HistoryPath()));
  EXPECT_NE(Contents(folder / "jobs/a@a-1/history.jsonl"), "");
  EXPECT_EQ(Contents(folder / "jobs/a/run"), "a-2\n");
}

TEST_F(JobFilesTest, ARunThatGoesOnBeginsWithTheStepsBeforeIt) {
  Append(1, 5);
  const std::string whole = Contents(HistoryPath());
  const std::string upto3 = whole.substr(0, whole.find("{\"step\":4,"));
  v1::SampleRecord sample;
  sample.set_prompt("Once");
  sample.set_text(" upon\n\"a\" time");
  for (const uint64_t step : {2, 4}) {
    sample.set_step(step);
    ASSERT_TRUE(files.AppendSamples("a", "a-1", {sample}).ok());
  }
  for (int i = 0; i < 2; ++i) {  // again, after a restart
    ASSERT_TRUE(files.Prepare("a", "a-2", "a-1", 4).ok());
    EXPECT_EQ(Contents(HistoryPath()), upto3);
    EXPECT_EQ(Contents(folder / "jobs/a/samples.jsonl"),
              "{\"step\":2,\"prompt\":\"Once\",\"text\":\" upon\\n\\\"a\\\" time\"}\n");
  }
  ASSERT_TRUE(files.AppendHistory("a", "a-2", {Record(4, 0.25), Record(5, 0.2)}).ok());
  EXPECT_EQ(Contents(HistoryPath()), whole);
  EXPECT_EQ(Contents(folder / "jobs/a@a-1/history.jsonl"), whole);

  const auto ends = files.Recover("jobs/a", true, 4);
  ASSERT_TRUE(ends.ok()) << ends.status();
  EXPECT_EQ(ends->warning, "");
  EXPECT_EQ(ends->first.step(), 4u);
  EXPECT_EQ(ends->last.step(), 5u);
  EXPECT_EQ(ends->sampled.at("Once"), 2u);
}

TEST_F(JobFilesTest, AHistoryThatLacksStepsBeforeTheRunIsWhole) {
  Append(1, 2);  // the older run was killed before it could report the third
  ASSERT_TRUE(files.Prepare("a", "a-2", "a-1", 4).ok());
  EXPECT_EQ(files.Recover("jobs/a", true, 4)->last.step(), 0u);  // no step of its own yet
  ASSERT_TRUE(files.AppendHistory("a", "a-2", {Record(4, 0.25), Record(5, 0.2)}).ok());
  const std::string whole = Contents(HistoryPath());
  const auto ends = files.Recover("jobs/a", true, 4);
  EXPECT_EQ(ends->warning, "");
  EXPECT_EQ(ends->last.step(), 5u);
  EXPECT_EQ(Contents(HistoryPath()), whole);
}

TEST_F(JobFilesTest, ARunThatWentBackStillBeganWhereItBegan) {
  ASSERT_TRUE(files.Prepare("a", "a-1").ok());
  Append(1, 5);
  auto ends = files.Recover("jobs/a", true, 4, /*own_from=*/1);
  EXPECT_EQ(ends->first.step(), 1u);
  EXPECT_EQ(ends->last.step(), 5u);
  ends = files.Recover("jobs/a", true, 6, /*own_from=*/1);
  EXPECT_EQ(ends->first.step(), 1u);
  EXPECT_EQ(ends->last.step(), 0u) << "it is to do step 6";
}

TEST_F(JobFilesTest, ARunWhoseOlderOneIsNotThereBeginsWithItsOwnSteps) {
  ASSERT_TRUE(files.Prepare("a", "a-2", "a-0", 4).ok());
  EXPECT_FALSE(std::filesystem::exists(HistoryPath()));
  ASSERT_TRUE(files.AppendHistory("a", "a-2", {Record(4, 0.25)}).ok());
  EXPECT_EQ(files.Recover("jobs/a", true, 4)->first.step(), 4u);
}

TEST_F(JobFilesTest, TheLossOfTheValidationSetIsReadBack) {
  v1::StepRecord record = Record(1, 0.5);
  record.set_eval_loss(0.1 + 0.2);
  ASSERT_TRUE(files.AppendHistory("a", "a-1", {record, Record(2, 0.4)}).ok());
  HistoryReader reader(HistoryPath());
  const auto records = reader.Next(10);
  ASSERT_TRUE(records.ok());
  EXPECT_EQ((*records)[0].eval_loss(), 0.1 + 0.2);
  EXPECT_FALSE((*records)[1].has_eval_loss());
}

TEST_F(JobFilesTest, WhatARollBackCostIsReadBackAndStaysWhereTheHistoryIsCut) {
  v1::StepRecord record = Record(2, 0.5);
  record.set_steps_lost(3);
  ASSERT_TRUE(files.AppendHistory("a", "a-1", {Record(1, 0.6), record, Record(3, 0.4)}).ok());
  ASSERT_TRUE(files.Truncate("a", "a-1", 3).ok());
  HistoryReader reader(HistoryPath());
  const auto records = reader.Next(10);
  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_EQ(records->size(), 2u);
  EXPECT_EQ((*records)[0].steps_lost(), 0u);
  EXPECT_EQ((*records)[1].steps_lost(), 3u);
  const auto ends = files.Recover("jobs/a", true);
  ASSERT_TRUE(ends.ok()) << ends.status();
  EXPECT_EQ(ends->last.steps_lost(), 3u);
}

TEST_F(JobFilesTest, SamplesAreReadBackWithEveryCharacterAndATornOneIsCut) {
  v1::SampleRecord sample;
  sample.set_step(7);
  sample.set_prompt("\xe4\xbd\xa0");
  sample.set_text(std::string("a\0b\x01\n\t\xf0\x9f\x98\x80", 10));
  ASSERT_TRUE(files.AppendSamples("a", "a-1", {sample}).ok());
  const std::string path = folder / "jobs/a/samples.jsonl";
  const std::string whole = Contents(path);
  std::ofstream(path, std::ios::app) << "{\"step\":8,";
  SampleReader reader(path);
  const auto samples = reader.Next(10);
  ASSERT_TRUE(samples.ok());
  ASSERT_EQ(samples->size(), 1u);
  EXPECT_EQ(samples->front().text(), sample.text());
  EXPECT_EQ(samples->front().prompt(), sample.prompt());
  const auto ends = files.Recover("jobs/a", true);
  EXPECT_THAT(ends->warning, HasSubstr("samples.jsonl: a torn last line"));
  EXPECT_EQ(Contents(path), whole);
}

TEST_F(JobFilesTest, LogsAreCappedWithANotice) {
  const std::string path = folder / "jobs/a/logs/rank-3.log";
  ASSERT_TRUE(files.AppendLog("a", "a-1", 3, {"first", "two\nlines"}).ok());
  EXPECT_EQ(Contents(path), "first\ntwo lines\n");
  std::filesystem::resize_file(path, JobFiles::kMaxLogBytes - 10);
  ASSERT_TRUE(files.AppendLog("a", "a-1", 3, {"0123456789"}).ok());
  const uint64_t size = std::filesystem::file_size(path);
  ASSERT_TRUE(files.AppendLog("a", "a-1", 3, {"never"}).ok());
  EXPECT_EQ(std::filesystem::file_size(path), size);
  LogReader reader(path);
  std::string text;
  for (std::string part; !(part = *reader.Next(1 << 20)).empty();) text = part;
  EXPECT_THAT(text, HasSubstr("later lines are dropped"));
}

TEST_F(JobFilesTest, AFullDiskLeavesTheHistoryAsItWas) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  std::filesystem::create_symlink("/dev/full", HistoryPath());
  const absl::Status status = files.AppendHistory("a", "a-1", {Record(1, 0.1)});
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("history.jsonl"));
}

TEST(ParseHistoryLine, RefusesWhatIsNoStep) {
  for (const char* line : {"", "{}", "[1]", "{\"step\":-1}", "{\"step\":1.5,\"loss\":1}",
                           "{\"step\":1,\"loss\":\"x\",\"grad_norm\":1,\"learning_rate\":1,"
                           "\"tokens\":1,\"seconds\":1}"}) {
    EXPECT_FALSE(ParseHistoryLine(line).ok()) << line;
  }
}

v1::SampleRecord Sample(uint64_t step, const std::string& prompt) {
  v1::SampleRecord sample;
  sample.set_step(step);
  sample.set_prompt(prompt);
  sample.set_text("text");
  return sample;
}

TEST_F(JobFilesTest, WhatIsCutIsGoneAndWhatStaysIsByteForByteTheSame) {
  Append(1, 4);
  const std::string kept = Contents(HistoryPath());
  Append(5, 9);
  ASSERT_TRUE(
      files.AppendSamples("a", "a-1", {Sample(4, "x"), Sample(4, "y"), Sample(8, "x")}).ok());
  ASSERT_TRUE(files.Truncate("a", "a-1", 5).ok());
  EXPECT_EQ(Contents(HistoryPath()), kept);
  EXPECT_EQ(Contents(folder / "jobs/a/samples.jsonl"),
            "{\"step\":4,\"prompt\":\"x\",\"text\":\"text\"}\n"
            "{\"step\":4,\"prompt\":\"y\",\"text\":\"text\"}\n");
  // Said again after a restart, and with nothing there to cut.
  ASSERT_TRUE(files.Truncate("a", "a-1", 5).ok());
  EXPECT_EQ(Contents(HistoryPath()), kept);
  EXPECT_FALSE(std::filesystem::exists(HistoryPath() + ".part"));
  // Everything: the run goes on from its first step.
  ASSERT_TRUE(files.Truncate("a", "a-1", 1).ok());
  EXPECT_EQ(Contents(HistoryPath()), "");
}

TEST_F(JobFilesTest, AHistoryThatCannotBeCutIsLeftAsItIs) {
  Append(1, 4);
  const std::string before = Contents(HistoryPath());
  EXPECT_EQ(files.Truncate("a", "a-2", 2).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(files.Truncate("b", "b-1", 2).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(std::filesystem::create_directories(HistoryPath() + ".part/in/the/way"));
  EXPECT_FALSE(files.Truncate("a", "a-1", 2).ok());
  EXPECT_EQ(Contents(HistoryPath()), before);
}

TEST_F(JobFilesTest, ACutThatWasCutShortIsDoneAnew) {
  Append(1, 6);
  std::ofstream(HistoryPath() + ".part") << "what a crash has left of the last one";
  ASSERT_TRUE(files.Truncate("a", "a-1", 3).ok());
  HistoryReader reader(HistoryPath());
  const auto records = reader.Next(10);
  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_EQ(records->size(), 2u);
  EXPECT_EQ(records->back().step(), 2u);
}

TEST_F(JobFilesTest, AReaderOfAHistoryThatIsCutSeesEveryStepOnce) {
  const auto steps = [](HistoryReader* reader, size_t most) {
    std::vector<uint64_t> seen;
    const auto records = reader->Next(most);
    EXPECT_TRUE(records.ok()) << records.status();
    if (records.ok()) {
      for (const v1::StepRecord& record : *records) seen.push_back(record.step());
    }
    return seen;
  };
  HistoryReader behind(HistoryPath()), ahead(HistoryPath());
  Append(1, 8);
  EXPECT_THAT(steps(&behind, 2), ::testing::ElementsAre(1, 2));
  EXPECT_THAT(steps(&ahead, 100), ::testing::ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  ASSERT_TRUE(files.Truncate("a", "a-1", 5).ok());
  EXPECT_THAT(steps(&ahead, 100), ::testing::IsEmpty());
  Append(5, 6);
  EXPECT_THAT(steps(&behind, 100), ::testing::ElementsAre(3, 4, 5, 6));
  EXPECT_THAT(steps(&ahead, 100), ::testing::IsEmpty());
  Append(7, 10);
  EXPECT_THAT(steps(&behind, 100), ::testing::ElementsAre(7, 8, 9, 10));
  EXPECT_THAT(steps(&ahead, 100), ::testing::ElementsAre(9, 10));
}

TEST_F(JobFilesTest, AReaderOfSamplesThatAreCutSeesEachOnce) {
  ASSERT_TRUE(
      files.AppendSamples("a", "a-1", {Sample(2, "x"), Sample(2, "y"), Sample(4, "x")}).ok());
  SampleReader reader(folder / "jobs/a/samples.jsonl");
  ASSERT_EQ(reader.Next(1)->size(), 1u);
  ASSERT_TRUE(files.Truncate("a", "a-1", 3).ok());
  ASSERT_TRUE(files.AppendSamples("a", "a-1", {Sample(4, "x"), Sample(4, "y")}).ok());
  const auto rest = reader.Next(10);
  ASSERT_TRUE(rest.ok()) << rest.status();
  ASSERT_EQ(rest->size(), 3u);
  EXPECT_EQ(rest->front().prompt(), "y");
  EXPECT_EQ(rest->front().step(), 2u);
  EXPECT_EQ(rest->back().step(), 4u);
}

}  // namespace
}  // namespace zeroshard::coordinator
