// What tensor ranks push to the shard stores and pull from them.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "common/plan/pipeline_stages.h"
#include "common/plan/stage_model.h"
#include "common/plan/tensor_slices.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

// Sizes that leave paddings nearly everywhere.
ModelTable Model(const char* architecture, uint32_t kv_heads, uint32_t vocab, bool tied) {
  v1::ModelSpec spec;
  spec.set_architecture(architecture);
  spec.set_hidden_size(96);
  spec.set_layers(2);
  spec.set_heads(8);
  spec.set_sequence_length(8);
  spec.set_vocab_size(vocab);
  spec.set_tie_embeddings(tied);
  if (spec.architecture() == "llama") {
    spec.set_hidden_size(40);
    spec.set_head_dim(16);
    spec.set_kv_heads(kv_heads);
    spec.set_intermediate_size(24);
    spec.set_attention_bias(true);
    spec.set_mlp_bias(true);
  }
  return *MakeModelTable(spec);
}

std::vector<ModelTable> Models() {
  std::vector<ModelTable> models;
  for (const uint32_t vocab : {3u, 61u}) {
    for (const bool tied : {false, true}) {
      models.push_back(Model("gpt2", 0, vocab, tied));
      for (const uint32_t kv : {2u, 8u}) models.push_back(Model("llama", kv, vocab, tied));
    }
  }
  return models;
}

// A unit cut anywhere: begin, cuts, end.
std::vector<int64_t> Cuts(int64_t length, std::mt19937* random) {
  std::vector<int64_t> cuts = {0, length};
  for (int i = 0; i < 6 && length > 0; ++i)
    cuts.push_back(static_cast<int64_t>((*random)() % static_cast<uint64_t>(length)));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

// What each rank of a tensor group sends of a unit in pieces, counted by element of the whole.
struct Counts {
  std::vector<int> pushed, pulled;
};
void Count(const TensorRank& slice, size_t u, std::mt19937* random, Counts* counts) {
  const std::vector<int64_t> cuts = Cuts(slice.model.units[u].length, random);
  int64_t pushed = 0, pulled = 0;
  for (size_t c = 0; c + 1 < cuts.size(); ++c) {
    const auto runs = FullRuns(slice, u, {cuts[c], cuts[c + 1]});
    for (const SliceRun& run : runs) {
      EXPECT_GE(run.local, cuts[c]);
      EXPECT_LE(run.local + run.size, cuts[c + 1]);
      const int64_t padding = PaddingBehind(run);
      EXPECT_LT(padding, 64);
      for (int64_t e = run.flat; e < run.flat + run.size; ++e) {
        ++counts->pulled.at(static_cast<size_t>(e));
        counts->pushed.at(static_cast<size_t>(e)) += run.home;
      }
      for (int64_t e = run.flat + run.size; e < run.flat + run.size + padding; ++e)
        counts->pushed.at(static_cast<size_t>(e)) += run.home;
    }
    pushed += PushedElements(runs);
    pulled += PulledElements(runs);
  }
  const auto whole = FullRuns(slice, u, {0, slice.model.units[u].length});
  EXPECT_EQ(pushed, PushedElements(whole)) << "pieces do not matter";
  EXPECT_EQ(pulled, PulledElements(whole));
}

TEST(StoreElements, EachElementOfAChunkIsPushedOnceWhateverThePiecesAre) {
  std::mt19937 random(3);
  int split = 0;
  for (const ModelTable& full : Models()) {
    for (int t = 1; t <= 8; ++t) {
      if (!TensorProblem(full, t).empty()) continue;
      split += t > 1;
      for (size_t u = 0; u < full.units.size(); ++u) {
        const auto length = static_cast<size_t>(full.units[u].length);
        Counts counts{std::vector<int>(length), std::vector<int>(length)};
        for (int rank = 0; rank < t; ++rank)
          Count(MakeTensorRank(full, t, rank), u, &random, &counts);
        EXPECT_EQ(counts.pushed, std::vector<int>(length, 1)) << full.units[u].name << " on " << t;
        std::vector<int> held(length);
        for (const ParameterInfo& p : full.units[u].parameters)
          std::fill_n(held.begin() + p.offset, p.size, 1);
        for (size_t e = 0; e < length; ++e) ASSERT_EQ(counts.pulled[e] > 0, held[e] > 0) << e;
      }
    }
  }
  EXPECT_GE(split, 12);
}

// Elements of a rank's unit by number, written to the places that the runs say: every rank's local
// copy of a tensor is the full tensor's rows that it holds.
TEST(StoreElements, PlacesAreThoseOfTheTensorsRows) {
  const ModelTable full = Model("llama", 2, 61, true);
  for (const int t : {2, 4, 8}) {
    for (int rank = 0; rank < t; ++rank) {
      const TensorRank slice = MakeTensorRank(full, t, rank);
      for (size_t u = 0; u < full.units.size(); ++u) {
        const UnitTable& local = slice.model.units[u];
        std::vector<int64_t> place(static_cast<size_t>(local.length), -1);
        for (const SliceRun& run : FullRuns(slice, u, {0, local.length}))
          for (int64_t i = 0; i < run.size; ++i)
            place[static_cast<size_t>(run.local + i)] = run.flat + i;
        for (size_t i = 0; i < local.parameters.size(); ++i) {
          const ParameterInfo &l = local.parameters[i], &f = full.units[u].parameters[i];
          const int64_t row = l.size / l.shape[0];
          for (int64_t e = 0; e < l.size; ++e) {
            const int64_t in_full = slice.slices[u][i].begin + e / row;
            const int64_t wanted = in_full < slice.slices[u][i].end
                                       ? f.offset + in_full * row + e % row
                                       : -1;  // behind the vocabulary's end
            ASSERT_EQ(place[static_cast<size_t>(l.offset + e)], wanted) << l.name << " " << e;
          }
        }
      }
    }
  }
}

// The last stage's copy of a tied table lacks what gpt2's embedding has behind it.
TEST(StoreElements, AStageHasRunsOfItsOwnUnitsAlone) {
  const ModelTable full = Model("gpt2", 0, 61, true);
  const TensorRank slice = MakeTensorRank(full, 2, 1);
  const PipelineStages stages = *CutStages({1, 1, 1, 1}, 2, 1);
  TensorRank last = slice;
  last.model = MakeStageModel(slice.model, stages, 1).model;
  EXPECT_TRUE(FullRuns(last, 1, {0, 0}).empty());
  const auto copy = FullRuns(last, 0, {0, slice.model.units[0].length});
  ASSERT_EQ(copy.size(), 1u);
  EXPECT_EQ(copy[0].flat, 31 * 96);
  EXPECT_EQ(copy[0].size, 30 * 96);
  EXPECT_EQ(FullRuns(slice, 0, {0, slice.model.units[0].length}).size(), 2u);
  const auto whole = FullRuns(slice, 3, {0, slice.model.units[3].length});
  const auto staged = FullRuns(last, 3, {0, slice.model.units[3].length});
  ASSERT_EQ(whole.size(), staged.size());
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(whole[i].flat, staged[i].flat);
}

}  // namespace
}  // namespace zeroshard
