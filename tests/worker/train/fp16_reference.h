// Training in fp16 against PyTorch's in float16, with DeepSpeed's loss scale (tests/reference):
// which steps are skipped and every scale are the same, losses and norms near.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/train/reference_job.h"

namespace zeroshard {

// The distance of two tensors by the size of the second.
inline double RelativeDistance(const std::vector<float>& seen, const std::vector<float>& wanted) {
  EXPECT_EQ(seen.size(), wanted.size());
  double difference = 0, size = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    difference += std::pow(double{seen[i]} - double{wanted[i]}, 2);
    size += std::pow(double{wanted[i]}, 2);
  }
  return std::sqrt(difference / size);
}

inline void ExpectFp16IsPyTorchs(int world, int stage, const RankBackend& backend) {
  const auto reference = Reference::Load("gpt2_fp16");
  ASSERT_TRUE(reference.ok()) << reference.status();
  const v1::JobSpec spec = ReferenceJob(*reference, world, stage);
  const ReferenceData data(*reference, spec.seed());
  RunOptions options = ReferenceRun(*reference, world);
  options.backend = backend;
  const std::vector<float> loss = *reference->Floats("loss");
  const std::vector<float> norm = *reference->Floats("grad_norm");
  const std::vector<float> scale = *reference->Floats("loss_scale");
  const std::vector<int32_t> skipped = *reference->Ints("skipped");
  for (const RankResult& result : TrainJob(spec, options, data)) {
    ASSERT_TRUE(result.status.ok()) << result.status;
    ASSERT_EQ(result.records.size(), loss.size());
    for (size_t s = 0; s < loss.size(); ++s) {
      SCOPED_TRACE(absl::StrFormat("step %d", s + 1));
      const v1::StepRecord& record = result.records[s];
      EXPECT_EQ(record.loss_scale(), scale[s]);
      EXPECT_EQ(record.skipped(), skipped[s] != 0);
      EXPECT_NEAR(record.loss(), loss[s], 2e-3 * loss[s]);
      if (skipped[s] == 0) {
        EXPECT_NEAR(record.grad_norm(), norm[s], 2e-2 * norm[s]);
      } else {
        EXPECT_FALSE(std::isfinite(record.grad_norm()));
      }
    }
    for (size_t t = 0; t < options.tensors.size(); ++t) {
      // Its true gradient is zero; reference_test.cc says why.
      if (options.tensors[t].ends_with("attn.k.bias")) continue;
      const std::vector<float> wanted = *reference->Tensor("final", options.tensors[t]);
      EXPECT_LE(RelativeDistance(result.tensors[t], wanted), 2e-2) << options.tensors[t];
    }
  }
}

}  // namespace zeroshard
