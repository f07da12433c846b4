#include "worker/zero/digest.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

std::vector<float> Values() {
  std::vector<float> values;
  for (int i = 0; i < 1000; ++i) values.push_back(static_cast<float>(i * i % 97) * 0.25f);
  return values;
}

// The digest of `values` as unit 3, cut at multiples of 64.
std::string DigestOfParts(const std::vector<float>& values, const std::vector<size_t>& cuts) {
  WeightDigest total;
  size_t from = 0;
  for (size_t cut : cuts) {
    WeightDigest part;
    part.Add(3, from, absl::MakeConstSpan(values).subspan(from, cut - from));
    total.Combine(part);
    from = cut;
  }
  return total.Hex();
}

TEST(WeightDigestTest, DoesNotDependOnHowTheWeightsAreSharded) {
  const std::vector<float> values = Values();
  const std::string whole = DigestOfParts(values, {1000});
  EXPECT_EQ(DigestOfParts(values, {512, 1000}), whole);
  EXPECT_EQ(DigestOfParts(values, {64, 128, 960, 1000}), whole);
  EXPECT_EQ(DigestOfParts(values, {0, 1000, 1000}), whole) << "a rank that owns nothing";
}

TEST(WeightDigestTest, SeesOneBitOneSwapAndAnotherPlace) {
  const std::vector<float> values = Values();
  const std::string whole = DigestOfParts(values, {1000});
  std::vector<float> changed = values;
  changed[999] = std::nextafter(changed[999], 1e9f);
  EXPECT_NE(DigestOfParts(changed, {1000}), whole);
  changed = values;
  std::swap(changed[1], changed[70]);
  EXPECT_NE(DigestOfParts(changed, {1000}), whole);
  changed = values;
  std::swap_ranges(changed.begin(), changed.begin() + 64, changed.begin() + 64);
  EXPECT_NE(DigestOfParts(changed, {1000}), whole);
  changed = values;
  changed[5] = -changed[5];
  EXPECT_NE(DigestOfParts(changed, {1000}), whole);
}

}  // namespace
}  // namespace zeroshard
