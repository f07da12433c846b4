// Twenty steps of AdamW with clipping and a schedule against PyTorch's (tests/reference).
#include "tests/reference/reference.h"

#include <cmath>

#include "absl/strings/match.h"
#include "tests/worker/train/cluster_harness.h"

namespace zeroshard {
namespace {

// The reference's rows in the order in which a run of `seed` asks for samples.
class ReferenceData : public TokenDataset {
 public:
  ReferenceData(const Reference& reference, uint64_t seed)
      : sequence_(reference.table().config.sequence),
        tokens_(*reference.Ints("tokens")),
        targets_(*reference.Ints("targets")) {
    if (auto starts = reference.Ints("document_start"); starts.ok()) starts_ = *std::move(starts);
    const SampleOrder order(sample_count(), seed);
    row_of_sample_.resize(static_cast<size_t>(sample_count()));
    for (int64_t row = 0; row < sample_count(); ++row)
      row_of_sample_[static_cast<size_t>(order.At(row))] = row;
  }
  int64_t token_count() const override { return static_cast<int64_t>(tokens_.size()) + 1; }
  int64_t sample_count() const override { return static_cast<int64_t>(tokens_.size()) / sequence_; }
  void Sample(int64_t index, absl::Span<int32_t> tokens,
              absl::Span<int32_t> targets) const override {
    const int64_t at = row_of_sample_[static_cast<size_t>(index)] * sequence_;
    std::copy_n(tokens_.begin() + at, sequence_, tokens.begin());
    std::copy_n(targets_.begin() + at, sequence_, targets.begin());
  }
  bool masks_documents() const override { return !starts_.empty(); }
  void DocumentStarts(int64_t index, absl::Span<int32_t> starts) const override {
    const int64_t at = row_of_sample_[static_cast<size_t>(index)] * sequence_;
    std::copy_n(starts_.begin() + at, sequence_, starts.begin());
  }

 private:
  const int64_t sequence_;
  const std::vector<int32_t> tokens_, targets_;
  std::vector<int32_t> starts_;
  std::vector<int64_t> row_of_sample_;
};

std::vector<std::string> TensorNames(const ModelTable& table) {
  std::vector<std::string> names;
  for (const UnitTable& unit : table.units)
    for (const ParameterInfo& p : unit.parameters) names.push_back(p.name);
  return names;
}

class ReferenceTraining
    : public testing::TestWithParam<std::tuple<std::string, std::tuple<int, int>>> {};

INSTANTIATE_TEST_SUITE_P(Cases, ReferenceTraining,
                         testing::Combine(testing::ValuesIn(ReferenceNames()),
                                          testing::Values(std::tuple(1, 0), std::tuple(2, 3),
                                                          std::tuple(2, 1))),
                         [](const auto& info) {
                           return absl::StrFormat("%s_world%d_stage%d", std::get<0>(info.param),
                                                  std::get<0>(std::get<1>(info.param)),
                                                  std::get<1>(std::get<1>(info.param)));
                         });

TEST_P(ReferenceTraining, LossesNormsRatesAndFinalWeightsArePyTorchs) {
  const auto [name, placement] = GetParam();
  const auto [world, stage] = placement;
  auto reference = Reference::Load(name);
  ASSERT_TRUE(reference.ok()) << reference.status();
  v1::JobSpec spec = reference->spec();
  spec.mutable_data()->add_train("unused");
  spec.mutable_data()->set_tokenizer("tokens");
  spec.mutable_resources()->set_workers(static_cast<uint32_t>(world));
  spec.mutable_zero_optimization()->set_stage(static_cast<uint32_t>(stage));
  spec.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  if (spec.seed() == 0) spec.set_seed(3);  // else the one its masks were drawn from
  ASSERT_TRUE(NormaliseJobSpec(&spec).ok()) << NormaliseJobSpec(&spec);
  const bool gpt2 = reference->table().config.architecture == Architecture::kGpt2;
  const ReferenceData data(*reference, spec.seed());

  RunOptions options{.world = world};
  options.tensors = TensorNames(reference->table());
  options.prepare = [&](int, Trainer* trainer) -> absl::Status {
    for (const std::string& tensor : options.tensors) {
      auto values = reference->Tensor("initial", tensor);
      if (!values.ok()) return values.status();
      const absl::Status status = trainer->SetTensor(tensor, *values);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  const auto results = TrainJob(spec, options, data);
  const std::vector<float> loss = *reference->Floats("loss");
  const std::vector<float> norm = *reference->Floats("grad_norm");
  const std::vector<float> rate = *reference->Floats("learning_rate");
  for (const RankResult& result : results) {
    ASSERT_TRUE(result.status.ok()) << result.status;
    ASSERT_EQ(result.records.size(), loss.size());
    for (size_t s = 0; s < loss.size(); ++s) {
      SCOPED_TRACE(absl::StrFormat("step %d", s + 1));
      EXPECT_NEAR(result.records[s].loss(), loss[s], 1e-5 * loss[s]);
      EXPECT_NEAR(result.records[s].grad_norm(), norm[s], 1e-4 * norm[s]);
      EXPECT_NEAR(result.records[s].learning_rate(), rate[s], 1e-6 * rate[s]);
    }
    for (size_t t = 0; t < options.tensors.size(); ++t) {
      // Without rotary positions a key bias shifts every score of a query alike, so its true
      // gradient is zero, and Adam makes whole steps of what rounding leaves.
      if (gpt2 && absl::EndsWith(options.tensors[t], "attn.k.bias")) continue;
      const std::vector<float> expected = *reference->Tensor("final", options.tensors[t]);
      const std::vector<float>& seen = result.tensors[t];
      ASSERT_EQ(seen.size(), expected.size());
      double difference = 0, size = 0;
      for (size_t i = 0; i < seen.size(); ++i) {
        difference += std::pow(double{seen[i]} - double{expected[i]}, 2);
        size += std::pow(double{expected[i]}, 2);
      }
      // Adam divides by the root of exp_avg_sq: where a gradient is near 0 its rounding shows.
      EXPECT_LE(std::sqrt(difference), 1e-3 * std::sqrt(size)) << options.tensors[t];
    }
  }
}

}  // namespace
}  // namespace zeroshard
