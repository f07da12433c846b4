#include "coordinator/service/job_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace zeroshard::coordinator
