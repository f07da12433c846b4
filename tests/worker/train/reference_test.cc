// Twenty steps of AdamW with clipping and a schedule against PyTorch's (tests/reference).
#include <cmath>

#include "absl/strings/match.h"
#include "tests/worker/train/reference_job.h"

namespace zeroshard {
namespace {

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
  const v1::JobSpec spec = ReferenceJob(*reference, world, stage);
  const bool gpt2 = reference->table().config.architecture == Architecture::kGpt2;
  const ReferenceData data(*reference, spec.seed());
  const RunOptions options = ReferenceRun(*reference, world);
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
