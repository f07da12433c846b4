// What the slices of a mesh hold is what one process holds: the same digests, the same state to be
// saved, and for the same gradients the same bits afterwards.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <ostream>
#include <string>
#include <vector>

#include "common/kernels/convert.h"
#include "common/status_macros.h"
#include "gtest/gtest.h"
#include "tests/worker/zero/slice_harness.h"

namespace zeroshard {
namespace {

struct SliceCase {
  std::string model;
  MeshShape mesh;
  int stage = 0;
  DType dtype = DType::kF32;
  bool frozen = false;  // all but one MLP
};
void PrintTo(const SliceCase& c, std::ostream* out) { *out << c.model << " at stage " << c.stage; }

ModelTable ModelOf(const std::string& name, bool frozen = false) {
  return *MakeModelTable(SliceSpec(name, frozen));
}

ZeroOptions OptionsOf(int stage, DType dtype) {
  return {.stage = stage, .micro_batch = 4, .dtype = dtype, .persistence_threshold = 0};
}

std::vector<SliceCase> Cases() {
  std::vector<SliceCase> cases;
  for (const char* model : {"gpt2", "llama", "llama_untied"}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const MeshShape& mesh : {MeshShape{1, 1, 2}, MeshShape{1, 2, 2}, MeshShape{1, 1, 4}}) {
        cases.push_back({model, mesh, stage, DType::kF32, false});
        cases.push_back({model, mesh, stage, DType::kBF16, stage % 2 == 1});
      }
    }
    cases.push_back({model, {2, 1, 2}, 1, DType::kBF16, true});
    cases.push_back({model, {2, 2, 2}, 3, DType::kBF16, false});
  }
  return cases;
}

class SliceStateTest : public testing::TestWithParam<SliceCase> {};

INSTANTIATE_TEST_SUITE_P(Meshes, SliceStateTest, testing::ValuesIn(Cases()), [](const auto& info) {
  const SliceCase& c = info.param;
  return absl::StrCat(c.model, "_", c.mesh.pipeline, "x", c.mesh.data, "x", c.mesh.tensor, "_stage",
                      c.stage, c.dtype == DType::kF32 ? "_fp32" : "_bf16",
                      c.frozen ? "_frozen" : "");
});

TEST_P(SliceStateTest, DigestsAndWhatIsSavedAreThoseOfOneProcess) {
  const SliceCase& c = GetParam();
  const ModelTable full = ModelOf(c.model, c.frozen);
  SliceMesh alone(full, {}, OptionsOf(c.stage, c.dtype));
  SliceMesh mesh(full, c.mesh, OptionsOf(c.stage, c.dtype));
  EXPECT_EQ(mesh.LoadedDigests(), alone.LoadedDigests());
  EXPECT_EQ(mesh.WeightsDigest(), alone.WeightsDigest());
  const FullState wanted = alone.Saved(), seen = mesh.Saved();
  ASSERT_EQ(seen.size(), wanted.size());
  for (const auto& [key, values] : wanted)
    EXPECT_EQ(seen.at(key), values) << NameOf(key.first) << " " << key.second;
  // Exactly the vocabulary's rows (F15).
  EXPECT_EQ(seen.at({StateKind::kMaster, full.units[0].parameters[0].name}).size(), 53u * 48u);
}

// A digest that one element less, or one of another rank, would not change were none.
TEST(SliceStateTest, OneValueOfOneRankChangesTheDigest) {
  const ModelTable full = ModelOf("gpt2");
  SliceMesh mesh(full, {1, 1, 4}, OptionsOf(0, DType::kF32));
  const std::string before = mesh.WeightsDigest();
  std::vector<float> bias(48);
  ASSERT_TRUE(StateValues(StateKind::kMaster)
                  .Read(*full.units[1].Find("blocks.0.attn.q.bias"), 0, 48, bias.data())
                  .ok());
  const auto set = [&] {
    mesh.Each([&](size_t rank) {
      EXPECT_TRUE(mesh[rank].engine().SetTensor("blocks.0.attn.q.bias", bias).ok());
    });
    return mesh.WeightsDigest();
  };
  EXPECT_EQ(set(), before);
  bias[37] += 1;  // the last rank's
  EXPECT_NE(set(), before);
  const absl::Status refused =
      mesh[0].engine().SetTensor("blocks.0.attn.q.bias", std::vector<float>(12));
  EXPECT_EQ(refused.message(), "blocks.0.attn.q.bias has 48 elements, not 12");
}

TEST(SliceStateTest, SetTensorIsOfTheFullTensorAndKeepsPaddingZero) {
  const ModelTable full = ModelOf("llama");
  const ParameterInfo& table = full.units[0].parameters[0];
  const std::vector<float> ones(static_cast<size_t>(table.size), 1.0f);
  SliceMesh alone(full, {}, OptionsOf(0, DType::kBF16));
  SliceMesh mesh(full, {1, 1, 4}, OptionsOf(0, DType::kBF16));
  for (SliceMesh* of : {&alone, &mesh}) {
    of->Each(
        [&](size_t rank) { EXPECT_TRUE((*of)[rank].engine().SetTensor(table.name, ones).ok()); });
  }
  EXPECT_EQ(mesh.WeightsDigest(), alone.WeightsDigest());
  mesh.Each([&](size_t rank) {
    const absl::StatusOr<std::vector<float>> rows = mesh[rank].engine().GatherTensor(table.name);
    ASSERT_TRUE(rows.ok()) << rows.status();
    const TensorSlice& held = mesh[rank].slice().slices[0][0];
    std::vector<float> wanted(14 * 48, 0.0f);  // ceil(53 / 4) rows
    std::fill_n(wanted.begin(), (held.end - held.begin) * 48, 1.0f);
    EXPECT_EQ(*rows, wanted);
  });
}

// A gradient that tells element and step, of elements [begin, end) of a local unit in the wire
// type.
class Gradients {
 public:
  Gradients(const ModelTable& full, SliceRank* rank, uint64_t step)
      : full_(full), rank_(*rank), step_(step), dtype_(rank->policy().options.dtype) {}

  absl::Status Write(int unit, int64_t begin, int64_t end) const {
    GradientSink* const sink = rank_.engine().Sink(unit);
    ZS_ASSIGN_OR_RETURN(void* const to, sink->Acquire(begin, end));
    const std::vector<float> values = Of(unit, begin, end);
    cpu::Convert(values.data(), DType::kF32, end - begin, to, dtype_, 1);
    return sink->Done(begin, end);
  }

  // Of the table's rows, all of them, as the embedding's backward would; none where the head has
  // given them.
  void WriteRows() const {
    TokenRows* const rows = rank_.engine().rows();
    const ParameterInfo& table = rank_.slice().model.units[0].parameters[0];
    const TensorSlice& held = rank_.slice().slices[0][0];
    const int64_t columns = full_.config.hidden;
    const int64_t there = full_.config.tied ? 0 : held.end - held.begin;
    ASSERT_LE(there, rank_.policy().row_slots);
    for (int64_t i = 0; i < rank_.policy().row_slots; ++i)
      rows->ids()[i] = i < there ? static_cast<int32_t>(i) : -1;
    const std::vector<float> values = Of(0, table.offset, table.offset + there * columns);
    cpu::Convert(values.data(), DType::kF32, there * columns, rows->rows(), dtype_, 1);
  }

 private:
  std::vector<float> Of(int unit, int64_t begin, int64_t end) const {
    std::vector<float> values(static_cast<size_t>(end - begin));
    const auto u = static_cast<size_t>(unit);
    for (const SliceRun& run : FullRuns(rank_.slice(), u, {begin, end})) {
      const std::string& name = full_.units[u].parameters[static_cast<size_t>(run.parameter)].name;
      InitNormal(100 + step_, name, run.element, run.element + run.size, 0.3f,
                 values.data() + (run.local - begin));
    }
    return values;
  }

  const ModelTable& full_;
  SliceRank& rank_;
  const uint64_t step_;
  const DType dtype_;
};

// The calls of a step's one micro-batch; nothing is computed.
absl::Status GiveGradients(const ModelTable& full, SliceRank* rank, uint64_t step) {
  ZeroEngine& engine = rank->engine();
  const std::vector<UnitTable>& units = rank->slice().model.units;
  const int last = static_cast<int>(units.size()) - 1;
  const Gradients gradients(full, rank, step);
  engine.BeginStep(step);
  engine.BeginRound(0);
  for (int u = 0; u < last; ++u) {
    ZS_RETURN_IF_ERROR(engine.BeforeForward(u).status());
    ZS_RETURN_IF_ERROR(engine.AfterForward(u));
  }
  ZS_RETURN_IF_ERROR(engine.BeforeForward(last).status());
  if (full.config.tied) {
    const ElementRange table = TokenTableBlocks(rank->slice().model);
    ZS_RETURN_IF_ERROR(gradients.Write(0, table.begin, table.end));
  }
  ZS_RETURN_IF_ERROR(gradients.Write(last, 0, units.back().length));
  ZS_RETURN_IF_ERROR(engine.AfterBackward(last));
  for (int u = last - 1; u > 0; --u) {
    ZS_RETURN_IF_ERROR(engine.BeforeBackward(u).status());
    ZS_RETURN_IF_ERROR(gradients.Write(u, 0, units[static_cast<size_t>(u)].length));
    ZS_RETURN_IF_ERROR(engine.AfterBackward(u));
  }
  if (units[0].parameters.size() > 1)
    ZS_RETURN_IF_ERROR(gradients.Write(0, units[0].parameters[1].offset, units[0].length));
  gradients.WriteRows();
  return engine.AfterBackward(0);
}

// The parameters that are computed with, as they are bit by bit, by tensor; padding must be zero.
std::map<std::string, std::vector<int>> Parameters(const ModelTable& full, SliceMesh* mesh) {
  std::map<std::string, std::vector<int>> all;
  std::mutex mutex;
  mesh->Each([&](size_t r) {
    SliceRank& rank = (*mesh)[r];
    rank.engine().BeginEvaluation(9);
    const std::vector<UnitTable>& units = rank.slice().model.units;
    for (size_t u = 0; u < units.size(); ++u) {
      const absl::StatusOr<UnitParameters> p = rank.engine().BeforeForward(static_cast<int>(u));
      ASSERT_TRUE(p.ok()) << p.status();
      const auto* held = static_cast<const uint16_t*>(p->own);
      std::vector<uint16_t> padding(held, held + units[u].length);
      const std::lock_guard<std::mutex> lock(mutex);
      for (const SliceRun& run :
           FullRuns(rank.slice(), u, {0, static_cast<int64_t>(padding.size())})) {
        const ParameterInfo& info = full.units[u].parameters[static_cast<size_t>(run.parameter)];
        std::vector<int>& to = all[info.name];
        to.resize(static_cast<size_t>(info.size), -1);
        for (int64_t i = 0; i < run.size; ++i) {
          int& value = to[static_cast<size_t>(run.element + i)];
          uint16_t& seen = padding[static_cast<size_t>(run.local + i)];
          // Copies are alike.
          if (value >= 0) {
            EXPECT_EQ(seen, value) << info.name;
          }
          value = seen;
          seen = 0;
        }
      }
      EXPECT_EQ(padding, std::vector<uint16_t>(padding.size(), 0)) << units[u].name;
      EXPECT_TRUE(rank.engine().AfterForward(static_cast<int>(u)).ok());
    }
  });
  return all;
}

class SliceUpdateTest : public testing::TestWithParam<SliceCase> {};

std::vector<SliceCase> UpdateCases() {
  std::vector<SliceCase> cases;
  for (const char* model : {"gpt2", "llama", "llama_untied"}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const MeshShape& mesh : {MeshShape{1, 1, 2}, MeshShape{1, 2, 2}, MeshShape{1, 1, 4}})
        cases.push_back({model, mesh, stage, DType::kBF16, false});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Meshes, SliceUpdateTest, testing::ValuesIn(UpdateCases()),
                         [](const auto& info) {
                           const SliceCase& c = info.param;
                           return absl::StrCat(c.model, "_", c.mesh.data, "x", c.mesh.tensor,
                                               "_stage", c.stage);
                         });

TEST_P(SliceUpdateTest, TheSameGradientGivesTheBitsOfOneProcessRoundedAtRandomToo) {
  const SliceCase& c = GetParam();
  const ModelTable full = ModelOf(c.model);
  ZeroOptions options = OptionsOf(c.stage, c.dtype);
  options.rounding = {.stochastic = true, .seed = 77};
  options.max_reuse_distance = 0;
  SliceMesh alone(full, {}, options);
  SliceMesh mesh(full, c.mesh, options);
  std::vector<std::string> before;
  for (SliceMesh* of : {&alone, &mesh}) {
    before.push_back(of->WeightsDigest());
    for (int step = 1; step <= 2; ++step) {
      of->Each([&](size_t r) {
        SliceRank& rank = (*of)[r];
        const absl::Status given = GiveGradients(full, &rank, static_cast<uint64_t>(step));
        ASSERT_TRUE(given.ok()) << given;
        std::string nonfinite;
        ASSERT_TRUE(rank.engine().FinishGradients(&nonfinite).ok());
        EXPECT_EQ(nonfinite, "");
        ASSERT_TRUE(
            rank.engine()
                .Update({.learning_rate = 0.01f, .eps = 1e-8f, .weight_decay = 0.1f, .t = step})
                .ok());
        ASSERT_TRUE(rank.engine().Drain().ok());
      });
    }
  }
  EXPECT_NE(alone.WeightsDigest(), before[0]);
  EXPECT_EQ(mesh.WeightsDigest(), alone.WeightsDigest());
  const FullState wanted = alone.Saved(), seen = mesh.Saved();
  for (const auto& [key, values] : wanted)
    EXPECT_EQ(seen.at(key), values) << NameOf(key.first) << " " << key.second;
  const auto rounded = Parameters(full, &alone);
  EXPECT_EQ(Parameters(full, &mesh), rounded);
  // Not all to nearest.
  const std::string& name = full.units[1].parameters[2].name;
  const std::vector<float>& master = wanted.at({StateKind::kMaster, name});
  std::vector<uint16_t> nearest(master.size());
  cpu::Convert(master.data(), DType::kF32, static_cast<int64_t>(master.size()), nearest.data(),
               DType::kBF16, 1);
  EXPECT_NE(std::vector<int>(nearest.begin(), nearest.end()), rounded.at(name));
}

}  // namespace
}  // namespace zeroshard
