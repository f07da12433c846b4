#include "common/plan/model_shape.h"

#include "common/plan/model_table.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

TEST(ShapeOf, ComesNearTheCount) {
  for (const double wanted : {124e6, 1.5e9, 7.5e9, 40e9, 128e9, 175e9, 1e12, 2e12, 1e13}) {
    const auto spec = ShapeOf(wanted, {});
    ASSERT_TRUE(spec.ok()) << spec.status();
    const auto model = MakeModelTable(*spec);
    ASSERT_TRUE(model.ok()) << model.status();
    const double c = spec->hidden_size();
    const double off = c < 4096 ? 6 * c * c + 7 * c : 0.015 * wanted;
    EXPECT_NEAR(static_cast<double>(model->ParameterCount()), wanted, off) << wanted;
    if (c >= 4096) {
      EXPECT_EQ(spec->heads() % 8, 0u);
    }
    EXPECT_EQ(spec->hidden_size(), spec->heads() * 128);
    // Not a tower and not a pancake.
    const double ratio = c / spec->layers();
    EXPECT_GT(ratio, 64) << wanted;
    EXPECT_LT(ratio, 256) << wanted;
  }
}

// GPT-3 175B is 96 layers of 12288.
TEST(ShapeOf, FindsAKnownModel) {
  const auto spec = ShapeOf(175e9, {.sequence = 2048});
  ASSERT_TRUE(spec.ok());
  EXPECT_EQ(spec->hidden_size(), 12288u);
  EXPECT_EQ(spec->layers(), 96u);
}

TEST(ShapeOf, RefusesWhatIsNoSuchModel) {
  for (const double wanted : {0.0, -1.0, 9e6, 3e13}) {
    EXPECT_FALSE(ShapeOf(wanted, {}).ok()) << wanted;
  }
  const auto spec = ShapeOf(2e7, {.vocab = 10'000'000});
  ASSERT_FALSE(spec.ok());
  EXPECT_NE(spec.status().message().find("vocabulary"), std::string::npos);
}

}  // namespace
}  // namespace zeroshard
