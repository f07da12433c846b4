#include "common/spec/scalar.h"

#include <limits>

#include "common/spec/history_line.h"
#include "common/spec/nearest_key.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

TEST(Scalar, NumbersAreDecimal) {
  for (const char* text : {"0", "-1", "+1", "1.5", ".5", "1.", "1e3", "1E-3", "-.5e+2"}) {
    EXPECT_TRUE(IsNumberText(text)) << text;
  }
  for (const char* text :
       {"", "-", ".", "e3", "1e", "1e+", "0x1", "1_0", "nan", ".inf", "1 ", "a1"}) {
    EXPECT_FALSE(IsNumberText(text)) << text;
  }
}

TEST(Scalar, WholeNumbersMayBeWrittenAsReals) {
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(UnsignedFromText("5e8", most), 500'000'000u);
  EXPECT_EQ(UnsignedFromText("16.0", most), 16u);
  EXPECT_EQ(UnsignedFromText("18446744073709551615", most), most);
  EXPECT_EQ(UnsignedFromText("9007199254740993", most), 9007199254740993u);
  EXPECT_FALSE(UnsignedFromText("18446744073709551616", most));
  EXPECT_FALSE(UnsignedFromText("1e-3", most));
  EXPECT_FALSE(UnsignedFromText("1e17", most));
  EXPECT_FALSE(UnsignedFromText("11", 10));
  EXPECT_FALSE(UnsignedFromText("-0.5", most));
}

TEST(Scalar, DoublesReadBackAsThemselves) {
  for (const double value : {0.0, 1.0, -3.0, 0.1, 1e-8, 1e300, 5e-324, 1.0 / 3, 123456789.0}) {
    EXPECT_EQ(DoubleFromText(DoubleToText(value)), value) << DoubleToText(value);
  }
}

TEST(NearestKey, FindsOneThatIsNear) {
  EXPECT_EQ(NearestKey("gradient_clipp1ng", {"steps", "gradient_clipping"}), "gradient_clipping");
  EXPECT_EQ(NearestKey("stpes", {"seed", "steps"}), "steps");
  EXPECT_EQ(NearestKey("zzz", {"lr", "eps"}), "");
  EXPECT_EQ(NearestKey("", {"lr"}), "");
}

TEST(HistoryLine, HasItsKeysInOrderAndShortestNumbers) {
  v1::StepRecord record;
  record.set_step(7);
  record.set_loss(0.1);
  record.set_grad_norm(1.0 / 3);
  record.set_learning_rate(5e-05);
  record.set_tokens(4096);
  record.set_seconds(2);
  EXPECT_EQ(FormatHistoryLine(record),
            R"({"step":7,"loss":0.1,"grad_norm":0.3333333333333333,"learning_rate":5e-05,)"
            R"("tokens":4096,"seconds":2})");
}

TEST(HistoryLine, HasWhatIsOfSomeStepsOnlyBeforeTheSeconds) {
  v1::StepRecord record;
  record.set_step(7);
  record.set_steps_lost(3);
  EXPECT_EQ(FormatHistoryLine(record),
            R"({"step":7,"loss":0,"grad_norm":0,"learning_rate":0,"tokens":0,)"
            R"("steps_lost":3,"seconds":0})");
  record.set_eval_loss(2.5);
  EXPECT_EQ(FormatHistoryLine(record),
            R"({"step":7,"loss":0,"grad_norm":0,"learning_rate":0,"tokens":0,)"
            R"("eval_loss":2.5,"steps_lost":3,"seconds":0})");
}

TEST(HistoryLine, TellsTheScaleOfFp16AndWhichStepsWereSkipped) {
  v1::StepRecord record;
  record.set_step(7);
  record.set_loss_scale(32768);
  EXPECT_EQ(FormatHistoryLine(record),
            R"({"step":7,"loss":0,"grad_norm":0,"learning_rate":0,"tokens":0,)"
            R"("loss_scale":32768,"seconds":0})");
  record.set_skipped(true);
  EXPECT_EQ(FormatHistoryLine(record),
            R"({"step":7,"loss":0,"grad_norm":0,"learning_rate":0,"tokens":0,)"
            R"("loss_scale":32768,"skipped":true,"seconds":0})");
}

TEST(HistoryLine, NonFiniteNumbersAreNull) {
  v1::StepRecord record;
  record.set_loss(std::numeric_limits<double>::quiet_NaN());
  record.set_grad_norm(std::numeric_limits<double>::infinity());
  EXPECT_EQ(FormatHistoryLine(record),
            R"({"step":0,"loss":null,"grad_norm":null,"learning_rate":0,"tokens":0,"seconds":0})");
}

}  // namespace
}  // namespace zeroshard
