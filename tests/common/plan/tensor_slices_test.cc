#include "common/plan/tensor_slices.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

v1::ModelSpec Spec(const char* architecture, uint32_t heads, uint32_t kv_heads, uint32_t vocab) {
  v1::ModelSpec spec;
  spec.set_architecture(architecture);
  spec.set_hidden_size(4 * heads);
  spec.set_layers(2);
  spec.set_heads(heads);
  spec.set_kv_heads(kv_heads);
  spec.set_intermediate_size(6 * heads);
  spec.set_sequence_length(8);
  spec.set_vocab_size(vocab);
  return spec;
}

// Llamas with every bias, grouped queries or not, tied or not, and GPT-2s; vocabularies that no
// number of ranks divides and of fewer rows than ranks.
std::vector<ModelTable> Models() {
  std::vector<ModelTable> models;
  for (const uint32_t heads : {8u, 12u, 20u, 28u}) {
    for (const uint32_t vocab : {3u, 257u}) {
      for (const bool tied : {false, true}) {
        v1::ModelSpec gpt2 = Spec("gpt2", heads, 0, vocab);
        gpt2.set_tie_embeddings(tied);
        models.push_back(*MakeModelTable(gpt2));
        for (const uint32_t kv : {1u, 2u, 4u, heads}) {
          v1::ModelSpec llama = Spec("llama", heads, kv, vocab);
          llama.set_tie_embeddings(tied);
          llama.set_attention_bias(true);
          llama.set_mlp_bias(true);
          models.push_back(*MakeModelTable(llama));
        }
      }
    }
  }
  return models;
}

TensorRank RankOf(const ModelTable& model, int tensor, int rank) {
  EXPECT_EQ(TensorProblem(model, tensor), "");
  return MakeTensorRank(model, tensor, rank);
}

TEST(TensorSlices, HomesHoldEachElementOfEachTensorOnceAndCopiesTheSame) {
  int split = 0;
  for (const ModelTable& model : Models()) {
    for (int t = 1; t <= 8; ++t) {
      if (!TensorProblem(model, t).empty()) continue;
      split += t > 1;
      for (size_t u = 0; u < model.units.size(); ++u) {
        const auto& full = model.units[u].parameters;
        std::vector<std::vector<int>> homes(full.size()), held(full.size());
        for (size_t i = 0; i < full.size(); ++i) {
          homes[i].assign(static_cast<size_t>(full[i].size), 0);
          held[i] = homes[i];
        }
        for (int rank = 0; rank < t; ++rank) {
          const TensorRank slice = RankOf(model, t, rank);
          for (size_t i = 0; i < full.size(); ++i) {
            const ParameterInfo whole = FullParameter(slice, u, i);
            EXPECT_EQ(whole.name, full[i].name);
            EXPECT_EQ(whole.shape, full[i].shape);
            EXPECT_EQ(whole.size, full[i].size);
            EXPECT_EQ(whole.offset, full[i].offset);
          }
          for (const SliceRun& run : FullRuns(slice, u, {0, slice.model.units[u].length})) {
            const auto i = static_cast<size_t>(run.parameter);
            for (int64_t e = run.element; e < run.element + run.size; ++e) {
              ++held[i].at(static_cast<size_t>(e));
              homes[i].at(static_cast<size_t>(e)) += run.home;
            }
            const TensorSlice& s = slice.slices[u][i];
            EXPECT_EQ(run.home, s.home == rank);
            EXPECT_EQ(run.flat, full[i].offset + run.element);
            EXPECT_EQ(run.ends, run.element + run.size == full[i].size);
            EXPECT_LE(s.home, rank);
            EXPECT_LT(rank, s.home + s.copies);
          }
        }
        const TensorRank first = RankOf(model, t, 0);
        for (size_t i = 0; i < full.size(); ++i) {
          EXPECT_EQ(std::set<int>(homes[i].begin(), homes[i].end()), std::set<int>{1})
              << full[i].name << " on " << t;
          EXPECT_EQ(std::set<int>(held[i].begin(), held[i].end()),
                    std::set<int>{first.slices[u][i].copies})
              << full[i].name << " on " << t;
        }
      }
    }
  }
  EXPECT_GT(split, 100);
}

// Of a range of the local vector exactly its elements, in order; a range cut in two says the same.
TEST(TensorSlices, RunsOfARangeAreThoseOfTheWholeThatLieInIt) {
  const ModelTable model = *MakeModelTable(Spec("llama", 8, 2, 257));
  for (const int t : {1, 2, 4, 8}) {
    for (int rank = 0; rank < t; ++rank) {
      const TensorRank slice = RankOf(model, t, rank);
      for (size_t u = 0; u < model.units.size(); ++u) {
        const int64_t length = slice.model.units[u].length;
        std::vector<std::pair<int, int64_t>> whole(static_cast<size_t>(length), {-1, -1});
        for (const SliceRun& run : FullRuns(slice, u, {0, length})) {
          for (int64_t e = 0; e < run.size; ++e)
            whole[static_cast<size_t>(run.local + e)] = {run.parameter, run.element + e};
        }
        for (const int64_t step : {int64_t{1} << 20, int64_t{1000}, int64_t{37}}) {
          std::vector<std::pair<int, int64_t>> parts(whole.size(), {-1, -1});
          int64_t last = -1;
          for (int64_t begin = 0; begin < length; begin += step) {
            const int64_t end = std::min(length, begin + step);
            for (const SliceRun& run : FullRuns(slice, u, {begin, end})) {
              EXPECT_GT(run.local, last);
              EXPECT_GE(run.local, begin);
              EXPECT_LE(run.local + run.size, end);
              last = run.local + run.size - 1;
              for (int64_t e = 0; e < run.size; ++e)
                parts[static_cast<size_t>(run.local + e)] = {run.parameter, run.element + e};
            }
          }
          EXPECT_EQ(parts, whole);
        }
      }
    }
  }
}

// A rank alone computes its query heads: it has their keys and values, and their rows of proj.
TEST(TensorSlices, EachQueryHeadsKeyHeadIsOnItsRank) {
  for (const uint32_t kv : {1u, 2u, 4u, 8u}) {
    const ModelTable model = *MakeModelTable(Spec("llama", 8, kv, 257));
    const int64_t d = model.config.head_dim, group = 8 / kv;
    for (const int t : {1, 2, 4, 8}) {
      for (int rank = 0; rank < t; ++rank) {
        const TensorRank slice = RankOf(model, t, rank);
        const auto slice_of = [&](const char* name) {
          const UnitTable& unit = slice.model.units[1];
          return slice.slices[1][static_cast<size_t>(unit.Find(name) - unit.parameters.data())];
        };
        const TensorSlice q = slice_of("attn.q.weight"), k = slice_of("attn.k.weight");
        EXPECT_EQ(slice.model.config.heads * d, q.end - q.begin);
        EXPECT_EQ(slice.model.config.kv_heads * d, k.end - k.begin);
        EXPECT_EQ(slice_of("attn.v.weight").begin, k.begin);
        EXPECT_EQ(slice_of("attn.proj.weight").begin, q.begin);
        // Local query head h reads local key head h / (local group), as a model of its own would.
        const int64_t local_group = slice.model.config.heads / slice.model.config.kv_heads;
        for (int64_t h = 0; h < slice.model.config.heads; ++h)
          EXPECT_EQ((q.begin / d + h) / group, k.begin / d + h / local_group);
      }
    }
  }
}

// 2 key and value heads on 8 ranks: four have head 0, four head 1; ranks 0 and 4 are the homes.
TEST(TensorSlices, KeyHeadsFewerThanRanksAreHeldByNeighbours) {
  const ModelTable model = *MakeModelTable(Spec("llama", 8, 2, 257));
  for (int rank = 0; rank < 8; ++rank) {
    const TensorRank slice = RankOf(model, 8, rank);
    const UnitTable& unit = slice.model.units[1];
    const auto i = static_cast<size_t>(unit.Find("attn.v.weight") - unit.parameters.data());
    EXPECT_EQ(slice.slices[1][i].begin, rank / 4 * 4);  // of head size 4
    EXPECT_EQ(slice.slices[1][i].copies, 4);
    EXPECT_EQ(slice.slices[1][i].home, rank / 4 * 4);
    EXPECT_EQ(slice.IsHome(1, i), rank == 0 || rank == 4);
  }
}

// 50257 rows on 4 ranks: 12565 places each, of which the last has 12562 that are rows.
TEST(TensorSlices, TheVocabularyIsPaddedOnTheLastRanks) {
  const ModelTable model = *MakeModelTable(Spec("gpt2", 8, 0, 50257));
  for (int rank = 0; rank < 4; ++rank) {
    const TensorRank slice = RankOf(model, 4, rank);
    EXPECT_EQ(slice.model.config.vocab, 12565);
    EXPECT_EQ(slice.model.units[0].parameters[0].shape[0], 12565);
    EXPECT_EQ(slice.slices[0][0].begin, rank * 12565);
    EXPECT_EQ(slice.slices[0][0].end, rank < 3 ? (rank + 1) * 12565 : 50257);
    EXPECT_EQ(slice.model.units[0].parameters[1].shape[0], 8);  // positions: whole
  }
  // 3 rows on 8 ranks: one each on three, none on the others, and all take part.
  const ModelTable few = *MakeModelTable(Spec("llama", 8, 8, 3));
  EXPECT_EQ(RankOf(few, 8, 2).slices[0][0].end, 3);
  EXPECT_EQ(RankOf(few, 8, 7).slices[0][0].begin, 3);
  EXPECT_EQ(RankOf(few, 8, 7).model.units[0].parameters[0].shape[0], 1);
  EXPECT_TRUE(FullRuns(RankOf(few, 8, 7), 0, {0, 128}).empty());
}

// The same rules as of a whole model: starts at multiples of 64, q, k and v without a gap.
TEST(TensorSlices, EveryRankHasOneLayoutByTheRulesOfWholeModels) {
  for (const ModelTable& model : Models()) {
    for (int t = 1; t <= 8; ++t) {
      if (!TensorProblem(model, t).empty()) continue;
      const TensorRank first = RankOf(model, t, 0), end_rank = RankOf(model, t, t - 1);
      for (size_t u = 0; u < model.units.size(); ++u) {
        const UnitTable& unit = first.model.units[u];
        const UnitTable& last = end_rank.model.units[u];
        EXPECT_EQ(unit.length, last.length);
        int64_t end = 0;
        for (size_t i = 0; i < unit.parameters.size(); ++i) {
          const ParameterInfo& p = unit.parameters[i];
          EXPECT_EQ(p.offset, (end + 63) / 64 * 64);
          EXPECT_EQ(p.offset, last.parameters[i].offset);
          EXPECT_EQ(p.shape, last.parameters[i].shape);
          EXPECT_EQ(p.name, model.units[u].parameters[i].name);
          int64_t size = 1;
          for (const int64_t extent : p.shape) size *= extent;
          EXPECT_EQ(p.size, size);
          end = p.offset + p.size;
        }
        EXPECT_EQ(unit.length, (end + 63) / 64 * 64);
        if (unit.kind != UnitKind::kBlock) continue;
        const ParameterInfo *q = unit.Find("attn.q.weight"), *k = unit.Find("attn.k.weight");
        EXPECT_EQ(k->offset, q->offset + q->size);
        EXPECT_EQ(unit.Find("attn.v.weight")->offset, k->offset + k->size);
      }
    }
  }
}

TEST(TensorSlices, OfOneRankIsTheModelItself) {
  const ModelTable model = *MakeModelTable(Spec("llama", 8, 2, 257));
  const TensorRank slice = RankOf(model, 1, 0);
  EXPECT_EQ(slice.model.config.heads, 8);
  EXPECT_EQ(slice.model.config.kv_heads, 2);
  EXPECT_EQ(slice.model.ParameterCount(), model.ParameterCount());
  for (size_t u = 0; u < model.units.size(); ++u)
    EXPECT_EQ(slice.model.units[u].length, model.units[u].length);
}

TEST(TensorProblemTest, NamesTheKeyTheNumbersAndWhatToWrite) {
  const auto problem = [](const v1::ModelSpec& spec, int t) {
    return TensorProblem(*MakeModelTable(spec), t);
  };
  EXPECT_THAT(
      problem(Spec("gpt2", 8, 0, 257), 3),
      HasSubstr("8 heads (model.heads) on 3 tensor ranks (parallel.tensor): write a divisor "
                "of 8"));
  EXPECT_THAT(problem(Spec("gpt2", 8, 0, 257), 0), HasSubstr("parallel.tensor: seen 0"));
  EXPECT_THAT(problem(Spec("llama", 12, 6, 257), 4),
              HasSubstr("6 key and value heads (model.kv_heads) on 4 tensor ranks"));
  EXPECT_EQ(problem(Spec("llama", 12, 2, 257), 4), "");
  EXPECT_EQ(problem(Spec("llama", 12, 4, 257), 2), "");
  v1::ModelSpec narrow = Spec("llama", 8, 8, 257);
  narrow.set_intermediate_size(100);
  EXPECT_THAT(problem(narrow, 8), HasSubstr("100 columns of the MLP (model.intermediate_size)"));
  v1::ModelSpec torn = Spec("llama", 4, 4, 257);
  torn.set_hidden_size(8);
  torn.set_head_dim(2);
  EXPECT_EQ(problem(torn, 1), "");
  EXPECT_THAT(problem(torn, 4), HasSubstr("1 heads of 2 x 8 elements for each rank"));
}

TEST(TensorProblemTest, TokensOfASequenceAreDividedOnlyWhereThatIsAskedFor) {
  v1::ModelSpec spec = Spec("llama", 12, 6, 257);
  spec.set_sequence_length(10);
  ModelTable model = *MakeModelTable(spec);
  EXPECT_EQ(TensorProblem(model, 3), "");
  model.config.sequence_parallel = true;
  EXPECT_EQ(TensorProblem(model, 1), "");
  EXPECT_EQ(TensorProblem(model, 2), "");
  EXPECT_THAT(TensorProblem(model, 3),
              HasSubstr("10 tokens (model.sequence_length) on 3 tensor ranks (parallel.tensor) "
                        "that share each sequence (parallel.sequence_parallel): write a divisor "
                        "of 10"));
  EXPECT_TRUE(MakeTensorRank(model, 2, 1).model.config.DividesRows());
  EXPECT_FALSE(MakeTensorRank(model, 1, 0).model.config.DividesRows());
}

}  // namespace
}  // namespace zeroshard
