#include "worker/zero/fill.h"

#include <map>
#include <memory>
#include <mutex>

#include "gtest/gtest.h"
#include "worker/zero/unit_state.h"

namespace zeroshard {
namespace {

ModelTable TinyModel(bool frozen) {
  v1::ModelSpec model;
  model.set_architecture("gpt2");
  model.set_hidden_size(32);
  model.set_layers(2);
  model.set_heads(2);
  model.set_sequence_length(8);
  model.set_vocab_size(61);
  if (frozen) model.add_trainable("blocks.1.mlp.*");
  return *MakeModelTable(model);
}

// A value that tells tensor and element apart, and what was read of it how often.
class CountingSource : public ParameterSource {
 public:
  static float Value(const ParameterInfo& tensor, int64_t element) {
    return static_cast<float>(tensor.name.size()) + 1e-3f * static_cast<float>(element % 997);
  }
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override {
    EXPECT_GE(begin, 0);
    EXPECT_LT(begin, end);
    EXPECT_LE(end, tensor.size);
    std::vector<int>& times = read[tensor.name];
    times.resize(static_cast<size_t>(tensor.size));
    for (int64_t i = begin; i < end; ++i) {
      ++times[static_cast<size_t>(i)];
      out[i - begin] = Value(tensor, i);
    }
    return absl::OkStatus();
  }
  void DropPages() const override { ++drops; }

  mutable std::map<std::string, std::vector<int>> read;
  mutable int drops = 0;
};

TEST(FillTest, EveryRankReadsWhatItHoldsAndNothingElse) {
  const auto device = MakeCpuDevice();
  const ModelTable model = TinyModel(false);
  for (int world : {1, 2, 3, 4}) {
    for (int stage : {0, 1, 2, 3}) {
      const ZeroPolicy policy =
          MakeZeroPolicy(model, {.stage = stage, .world = world, .persistence_threshold = 0});
      const CountingSource source;
      for (int rank = 0; rank < world; ++rank) {
        auto units = MakeUnitStates(model, policy, rank, device.get());
        ASSERT_TRUE(units.ok());
        ASSERT_TRUE(FillParameters(source, &*units, device.get(), nullptr).ok());
        for (const UnitState& unit : *units) {
          for (const ParameterInfo& tensor : unit.table->parameters) {
            for (int64_t i = 0; i < tensor.size; ++i) {
              const int64_t at = tensor.offset + i;
              if (at < unit.own_begin || at >= unit.own_end) continue;
              ASSERT_EQ(*unit.Master(at), CountingSource::Value(tensor, i)) << tensor.name;
            }
          }
        }
      }
      const int times = stage == 3 ? 1 : world;  // resident units whole, on every rank
      for (const UnitTable& unit : model.units) {
        for (const ParameterInfo& tensor : unit.parameters)
          EXPECT_EQ(source.read.at(tensor.name),
                    std::vector<int>(static_cast<size_t>(tensor.size), times))
              << tensor.name << " stage " << stage << " world " << world;
      }
      EXPECT_EQ(source.drops, world * static_cast<int>(model.units.size()));
    }
  }
}

TEST(FillTest, MomentsAreThoseOfTrainableTensorsInTheStatesRange) {
  const auto device = MakeCpuDevice();
  const ModelTable model = TinyModel(true);
  for (int stage : {0, 2}) {
    const ZeroPolicy policy = MakeZeroPolicy(model, {.stage = stage, .world = 2});
    for (int rank : {0, 1}) {
      auto units = MakeUnitStates(model, policy, rank, device.get());
      ASSERT_TRUE(units.ok());
      const CountingSource source;
      ASSERT_TRUE(FillMoments(StateKind::kExpAvgSq, source, &*units, device.get(), nullptr).ok());
      for (const UnitState& unit : *units) {
        for (const ParameterInfo& tensor : unit.table->parameters) {
          EXPECT_TRUE(tensor.trainable || source.read.count(tensor.name) == 0) << tensor.name;
          if (!unit.trained) continue;
          for (int64_t at = std::max(tensor.offset, unit.state_begin);
               at < std::min(tensor.offset + tensor.size, unit.state_end); ++at) {
            const float wanted =
                tensor.trainable ? CountingSource::Value(tensor, at - tensor.offset) : 0.0f;
            ASSERT_EQ(unit.exp_avg_sq.as<float>()[at - unit.state_begin], wanted) << tensor.name;
            ASSERT_EQ(unit.exp_avg.as<float>()[at - unit.state_begin], 0.0f);
          }
        }
      }
    }
  }
}

// What is kept in 16 bits only is digested before it is rounded: the same as of fp32 values.
TEST(FillTest, FrozenParametersInSixteenBitsAreDigestedAsTheyCame) {
  const auto device = MakeCpuDevice();
  const ModelTable model = TinyModel(true);
  const CountingSource source;
  const UnitTable& unit = model.units[0];  // frozen as a whole
  std::vector<float> flat(static_cast<size_t>(unit.length), 0.0f);
  for (const ParameterInfo& tensor : unit.parameters)
    for (int64_t i = 0; i < tensor.size; ++i)
      flat[static_cast<size_t>(tensor.offset + i)] = CountingSource::Value(tensor, i);
  WeightDigest wanted;
  wanted.Add(0, 0, flat);
  for (int world : {1, 3}) {
    WeightDigest seen;
    const ZeroPolicy policy =
        MakeZeroPolicy(model, {.stage = 3, .world = world, .dtype = DType::kBF16});
    for (int rank = 0; rank < world; ++rank) {
      auto units = MakeUnitStates(model, policy, rank, device.get());
      ASSERT_TRUE(units.ok());
      ASSERT_TRUE(FillParameters(source, &*units, device.get(), nullptr).ok());
      ASSERT_FALSE((*units)[0].KeepsMaster());
      EXPECT_TRUE((*units)[0].filled.parts.empty());
      seen.Combine((*units)[0].filled.whole);
    }
    EXPECT_EQ(seen.Hex(), wanted.Hex()) << world;
  }
}

TEST(FillTest, ASourcesErrorAndAStopEndIt) {
  class Broken : public ParameterSource {
    absl::Status Read(const ParameterInfo& tensor, int64_t, int64_t, float*) const override {
      return absl::DataLossError("broken at " + tensor.name);
    }
  };
  const auto device = MakeCpuDevice();
  const ModelTable model = TinyModel(false);
  const ZeroPolicy policy = MakeZeroPolicy(model, {});
  auto units = MakeUnitStates(model, policy, 0, device.get());
  ASSERT_TRUE(units.ok());
  EXPECT_EQ(FillParameters(Broken(), &*units, device.get(), nullptr),
            absl::DataLossError("broken at wte.weight"));
  const std::atomic<bool> stop{true};
  EXPECT_EQ(FillMoments(StateKind::kExpAvg, CountingSource(), &*units, device.get(), &stop).code(),
            absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace zeroshard
