// However long a history, its curve is short and says the same.
#include "coordinator/service/page/curve.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "common/spec/history_line.h"
#include "tests/common/temp_folder.h"

namespace zeroshard::coordinator {
namespace {

v1::StepRecord Step(uint64_t step, double loss) {
  v1::StepRecord record;
  record.set_step(step);
  record.set_loss(loss);
  record.set_grad_norm(2.0);
  record.set_learning_rate(0.5);
  record.set_tokens(10);
  record.set_seconds(0.25);
  return record;
}

TEST(Curve, OfFewStepsHasEachOfThem) {
  Curve curve;
  curve.Add(Step(7, 4.0));
  v1::StepRecord evaluated = Step(8, 3.0);
  evaluated.set_eval_loss(3.5);
  evaluated.set_steps_lost(2);
  curve.Add(evaluated);
  EXPECT_EQ(curve.ToJson().dump(),
            R"({"width":1,"step":[7,8],"loss":[4.0,3.0],"least":[4.0,3.0],"most":[4.0,3.0],)"
            R"("grad_norm":[2.0,2.0],"learning_rate":[0.5,0.5],"tokens":[10,10],)"
            R"("seconds":[0.25,0.25],"eval":[[8,3.5]],"lost":[[8,2]],"skipped":[]})");
}

// Loss i at step i: of steps a..b the mean is (a+b)/2, the extremes are a and b.
TEST(Curve, OfManyStepsIsBoundedAndLosesNone) {
  for (const uint64_t steps : {599u, 600u, 601u, 1200u, 1201u, 100000u}) {
    Curve curve;
    for (uint64_t i = 1; i <= steps; ++i) curve.Add(Step(i, static_cast<double>(i)));
    const auto& points = curve.points();
    ASSERT_LE(points.size(), Curve::kMostPoints) << steps;
    EXPECT_GE(points.size(), std::min<size_t>(steps, Curve::kMostPoints / 2)) << steps;
    uint64_t next = 1, tokens = 0;
    for (const CurvePoint& point : points) {
      EXPECT_EQ(point.first, next);
      next = point.last + 1;
      tokens += point.tokens;
      EXPECT_EQ(point.steps, point.last - point.first + 1);
      if (&point != &points.back()) {
        EXPECT_EQ(point.steps, curve.width());
      }
      const double sum = static_cast<double>((point.first + point.last) * point.steps) / 2;
      EXPECT_EQ(point.loss_sum, sum);
      EXPECT_EQ(point.least, static_cast<double>(point.first));
      EXPECT_EQ(point.most, static_cast<double>(point.last));
    }
    EXPECT_EQ(next, steps + 1);
    EXPECT_EQ(tokens, steps * 10);
  }
}

TEST(Curve, KeepsRollbacksSkipsAndEvaluationsThroughJoining) {
  Curve curve;
  for (uint64_t i = 1; i <= 5000; ++i) {
    v1::StepRecord record = Step(i, 1.0);
    if (i % 1000 == 0) record.set_steps_lost(3);
    if (i % 500 == 0) record.set_eval_loss(static_cast<double>(i));
    if (i == 4321) {
      record.set_skipped(true);
      record.set_loss(std::numeric_limits<double>::quiet_NaN());
      record.set_grad_norm(std::numeric_limits<double>::infinity());
    }
    curve.Add(record);
  }
  const auto json = curve.ToJson();
  EXPECT_EQ(json["lost"].size(), 5u);
  EXPECT_EQ(json["skipped"].size(), 1u);
  EXPECT_EQ(json["skipped"][0][1], 1);
  ASSERT_EQ(json["eval"].size(), 10u);
  EXPECT_EQ(json["eval"][9], (nlohmann::ordered_json{5000, 5000.0}));
}

TEST(Curve, WhatIsNotFiniteIsNullAndNeverSpoilsAMean) {
  Curve curve;
  v1::StepRecord bad = Step(1, std::numeric_limits<double>::quiet_NaN());
  bad.set_skipped(true);
  curve.Add(bad);
  EXPECT_TRUE(curve.ToJson()["loss"][0].is_null());
  EXPECT_TRUE(curve.ToJson()["least"][0].is_null());
  Curve joined;
  for (uint64_t i = 1; i <= 1200; ++i) {
    joined.Add(Step(i, i % 2 == 0 ? 2.0 : std::numeric_limits<double>::infinity()));
  }
  const auto curves = joined.ToJson();
  for (const auto& value : curves["loss"]) EXPECT_EQ(value, 2.0);
}

void Append(const std::string& path, uint64_t from, uint64_t to, double loss) {
  std::ofstream file(path, std::ios::app);
  for (uint64_t i = from; i <= to; ++i) file << FormatHistoryLine(Step(i, loss)) << "\n";
}

TEST(CurveFile, GrowsWithItsFile) {
  TempFolder folder;
  CurveFile curve(folder / "history.jsonl");
  ASSERT_TRUE(curve.Update(absl::Seconds(10)).ok());
  EXPECT_EQ(curve.ToJson()["step"].size(), 0u);
  EXPECT_EQ(curve.ToJson()["complete"], true);
  Append(folder / "history.jsonl", 1, 5, 1.0);
  ASSERT_TRUE(curve.Update(absl::Seconds(10)).ok());
  EXPECT_EQ(curve.ToJson()["step"].size(), 5u);
  Append(folder / "history.jsonl", 6, 6, 1.0);
  ASSERT_TRUE(curve.Update(absl::Seconds(10)).ok());
  EXPECT_EQ(curve.ToJson()["step"].back(), 6);
}

// As JobFiles::Truncate cuts it: another file of that name, in which steps are done again.
TEST(CurveFile, ShowsStepsThatWereDoneAgainAsTheyAreNow) {
  TempFolder folder;
  const std::string path = folder / "history.jsonl";
  Append(path, 1, 10, 1.0);
  CurveFile curve(path);
  ASSERT_TRUE(curve.Update(absl::Seconds(10)).ok());
  Append(folder / "new", 1, 4, 1.0);
  Append(folder / "new", 5, 8, 7.0);
  std::filesystem::rename(folder / "new", path);
  ASSERT_TRUE(curve.Update(absl::Seconds(10)).ok());
  const auto json = curve.ToJson();
  EXPECT_EQ(json["step"].size(), 8u);
  EXPECT_EQ(json["loss"][3], 1.0);
  EXPECT_EQ(json["loss"][4], 7.0);
}

TEST(CurveFile, OfALongHistoryIsReadInPiecesThatEnd) {
  TempFolder folder;
  const std::string path = folder / "history.jsonl";
  Append(path, 1, 20000, 1.0);
  CurveFile curve(path);
  ASSERT_TRUE(curve.Update(absl::ZeroDuration()).ok());
  EXPECT_EQ(curve.ToJson()["complete"], false);
  EXPECT_LT(curve.ToJson()["step"].back(), 20000);
  for (int i = 0; i < 100 && curve.ToJson()["complete"] == false; ++i) {
    ASSERT_TRUE(curve.Update(absl::ZeroDuration()).ok());
  }
  EXPECT_EQ(curve.ToJson()["complete"], true);
  EXPECT_EQ(curve.ToJson()["step"].back(), 20000);
}

TEST(CurveFile, ADamagedLineIsNamedAndItsMendingSeen) {
  TempFolder folder;
  const std::string path = folder / "history.jsonl";
  Append(path, 1, 2, 1.0);
  std::ofstream(path, std::ios::app) << "{\"step\":3,\"loss\n";
  CurveFile curve(path);
  const absl::Status read = curve.Update(absl::Seconds(10));
  EXPECT_EQ(read.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(std::string(read.message()).find(path + " at byte "), std::string::npos) << read;
  std::filesystem::remove(path);
  Append(path, 1, 3, 1.0);
  ASSERT_TRUE(curve.Update(absl::Seconds(10)).ok());
  EXPECT_EQ(curve.ToJson()["step"].size(), 3u);
}

}  // namespace
}  // namespace zeroshard::coordinator
