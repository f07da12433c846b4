// Table 1 of the ZeRO paper (Rajbhandari et al. 2020, arXiv:1910.02054): GB of model state on a
// device, by data-parallel degree, for the three stages. Its digits as printed: rounded to the last
// one, or cut off there.
#include <cmath>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/plan/capacity.h"
#include "common/plan/model_shape.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

struct Row {
  int ranks;
  const char* printed[3];  // P_os, P_os+g, P_os+g+p: stages 1, 2, 3
};

struct Model {
  double parameters;
  Row rows[6];
};

constexpr Model kTable[] = {
    {7.5e9,
     {{1, {"120", "120", "120"}},
      {4, {"52.5", "41.3", "30"}},
      {16, {"35.6", "21.6", "7.5"}},
      {64, {"31.4", "16.6", "1.88"}},
      {256, {"30.4", "15.4", "0.47"}},
      {1024, {"30.1", "15.1", "0.12"}}}},
    {128e9,
     {{1, {"2048", "2048", "2048"}},
      {4, {"896", "704", "512"}},
      {16, {"608", "368", "128"}},
      {64, {"536", "284", "32"}},
      {256, {"518", "263", "8"}},
      {1024, {"513", "257", "2"}}}},
    {1e12,
     {{1, {"16000", "16000", "16000"}},
      {4, {"7000", "5500", "4000"}},
      {16, {"4750", "2875", "1000"}},
      {64, {"4187", "2218", "250"}},
      {256, {"4046", "2054", "62.5"}},
      {1024, {"4011", "2013", "15.6"}}}},
};

// Half a unit of its last digit where it was rounded, a whole one where it was cut off.
bool IsPrintedAs(double value, const std::string& printed) {
  double seen = 0;
  EXPECT_TRUE(absl::SimpleAtod(printed, &seen)) << printed;
  const size_t point = printed.find('.');
  const double unit = point == std::string::npos
                          ? 1
                          : std::pow(10, -static_cast<double>(printed.size() - point - 1));
  return std::abs(value - seen) <= unit / 2 + 1e-9 || (value >= seen && value < seen + unit);
}

TEST(ZeroTable, TheFormulaGivesEveryPrintedFigure) {
  for (const Model& model : kTable) {
    for (const Row& row : model.rows) {
      for (int stage = 1; stage <= 3; ++stage) {
        const double gb = ModelStateBytes(model.parameters, row.ranks, stage) / 1e9;
        EXPECT_TRUE(IsPrintedAs(gb, row.printed[stage - 1]))
            << model.parameters << " on " << row.ranks << " at stage " << stage << ": " << gb
            << ", printed " << row.printed[stage - 1];
      }
      // The table's K = 12 and 16-bit parameters and gradients: 16 bytes without sharding.
      EXPECT_EQ(ModelStateBytes(model.parameters, row.ranks, 0), 16 * model.parameters);
    }
  }
}

// A model of about that size, laid out tensor by tensor: per parameter of its own the same figures,
// but for the padding of shards and for what the token table's gradient takes beside.
TEST(ZeroTable, TheLayoutOfARealModelAgreesWithin2Percent) {
  for (const Model& model : kTable) {
    const auto spec = ShapeOf(model.parameters, {});
    ASSERT_TRUE(spec.ok()) << spec.status();
    Workload work;
    work.model = *MakeModelTable(*spec);
    work.options.dtype = DType::kBF16;
    work.fetch_one_ahead = true;
    const auto count = static_cast<double>(work.model.ParameterCount());
    EXPECT_NEAR(count, model.parameters, 0.02 * model.parameters);
    for (const Row& row : model.rows) {
      for (int stage = 0; stage <= 3; ++stage) {
        Configuration c;
        c.stage = stage;
        c.data = row.ranks;
        const Evaluation e = Evaluate(work, {.devices = row.ranks}, c);
        ASSERT_EQ(e.impossible, "");
        const auto state =
            static_cast<double>(e.bytes.parameters + e.bytes.gradients + e.bytes.optimizer);
        const double formula = ModelStateBytes(count, row.ranks, stage);
        EXPECT_NEAR(state, formula, 0.02 * formula)
            << model.parameters << " on " << row.ranks << " at stage " << stage;
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard
