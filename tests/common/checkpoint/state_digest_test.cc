#include "common/checkpoint/state_digest.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "tests/common/checkpoint/small_state.h"
#include "tests/common/temp_folder.h"

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

// Values from element 0 of unit 3 on, cut anywhere: the parts of some ranks.
PartedDigest Parted(const std::vector<float>& values, const std::vector<size_t>& cuts) {
  PartedDigest total;
  size_t from = 0;
  for (const size_t cut : cuts) {
    PartedDigest part;
    part.Add(3, from, absl::MakeConstSpan(values).subspan(from, cut - from), cut == values.size());
    total.Combine(part);
    from = cut;
  }
  return total;
}

TEST(PartedDigestTest, IsThatOfTheWholeWhereverItIsCut) {
  std::vector<float> values = Values();
  std::vector<float> padded = values;
  padded.resize(1024, 0.0f);
  const std::string whole = DigestOfParts(padded, {1024});
  for (const std::vector<size_t>& cuts : {std::vector<size_t>{1000},
                                          {1, 1000},
                                          {63, 65, 1000},
                                          {100, 101, 102, 103, 1000},
                                          {64, 128, 999, 1000},
                                          {500, 500, 1000},
                                          {12, 24, 36, 48, 60, 72, 960, 970, 1000}}) {
    PartedDigest digest = Parted(values, cuts);
    std::reverse(digest.parts.begin(), digest.parts.end());
    const absl::StatusOr<WeightDigest> joined = JoinParts(digest.parts);
    ASSERT_TRUE(joined.ok()) << joined.status();
    digest.whole.Combine(*joined);
    EXPECT_EQ(digest.whole.Hex(), whole) << cuts.size() << " parts";
  }
  EXPECT_TRUE(Parted(values, {64, 640, 1000}).parts.empty()) << "cut between blocks";
}

TEST(PartedDigestTest, RefusesABlockThatIsNotWholeOrThereTwice) {
  const std::vector<float> values = Values();
  std::vector<BlockPart> parts = Parted(values, {100, 1000}).parts;
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_TRUE(JoinParts(parts).ok());
  const absl::Status missing = JoinParts({parts[0]}).status();
  EXPECT_EQ(missing.message(),
            "digest of the state: of the elements of unit 3 from 64 to 128 some are from no rank; "
            "wanted each from one rank");
  const absl::Status twice = JoinParts({parts[0], parts[0], parts[1]}).status();
  EXPECT_EQ(twice.code(), absl::StatusCode::kInternal);
  parts[1].end = 65;
  EXPECT_EQ(JoinParts(parts).status().code(), absl::StatusCode::kInternal);
}

// As the ranks have it: a whole flat vector with zeros between the tensors, at multiples of 64.
std::string DigestOfFlat(const ModelTable& model, StateKind kind, uint64_t step) {
  WeightDigest digest;
  size_t index = 0;
  for (size_t u = 0; u < model.units.size(); ++u) {
    std::vector<float> flat;
    bool any = kind == StateKind::kMaster;
    for (const ParameterInfo& tensor : model.units[u].parameters) {
      any = any || tensor.trainable;
      flat.resize(static_cast<size_t>(tensor.offset), 0.0f);
      for (int64_t e = 0; e < tensor.size; ++e) {
        const bool has = kind == StateKind::kMaster || tensor.trainable;
        flat.push_back(has ? ValueOf(step, kind, index, e) : 0.0f);
      }
      ++index;
    }
    flat.resize((flat.size() + 63) / 64 * 64, 0.0f);
    if (any) digest.Add(u, 0, flat);
  }
  return digest.Hex();
}

TEST(DigestOfTest, IsThatOfTheRanksWhateverTheirNumber) {
  ModelTable model = SmallModel();
  for (UnitTable& unit : model.units) {
    int64_t at = 0;
    for (ParameterInfo& tensor : unit.parameters) {
      tensor.offset = at;
      at = (at + tensor.size + 63) / 64 * 64;
    }
  }
  for (const int world : {1, 3}) {
    const TempFolder folder;
    CheckpointStoreOptions options;
    options.dir = folder / "checkpoints";
    options.job = options.run_id = "small";
    const auto store = CheckpointStore::Open(&FileSystem::Real(), options);
    ASSERT_TRUE(store.ok()) << store.status();
    const auto path = Save(store->get(), &FileSystem::Real(), 5, world, "small");
    ASSERT_TRUE(path.ok()) << path.status();
    const auto reader = CheckpointReader::Open(*path);
    ASSERT_TRUE(reader.ok()) << reader.status();
    for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
      EXPECT_EQ(DigestOf(**reader, model, kind).value(), DigestOfFlat(model, kind, 5))
          << NameOf(kind);
    }
  }
}

}  // namespace
}  // namespace zeroshard
