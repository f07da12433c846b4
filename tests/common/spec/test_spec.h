// Specifications for the tests of this folder.
#pragma once

#include <string>
#include <vector>

#include "common/spec/job_spec.h"
#include "gtest/gtest.h"

namespace zeroshard {

inline constexpr char kSmallJob[] = R"(name: tiny
model: {architecture: gpt2, hidden_size: 64, layers: 1, heads: 2, sequence_length: 16, vocab_size: 256}
data: {train: [text], tokenizer: bytes}
resources: {workers: 2}
train_batch_size: 32
train_micro_batch_size_per_gpu: 8
steps: 100
)";

// The small job with overrides, read but not filled in.
inline v1::JobSpec Parsed(const std::vector<std::string>& overrides = {}) {
  const absl::StatusOr<v1::JobSpec> spec = ParseJobSpec(kSmallJob, "job.yaml", overrides);
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.ok() ? *spec : v1::JobSpec();
}

inline v1::JobSpec Normalised(const std::vector<std::string>& overrides = {}) {
  v1::JobSpec spec = Parsed(overrides);
  const absl::Status status = NormaliseJobSpec(&spec);
  EXPECT_TRUE(status.ok()) << status;
  return spec;
}

// What NormaliseJobSpec says against the small job with overrides; empty if nothing.
inline std::string Refusal(const std::vector<std::string>& overrides) {
  v1::JobSpec spec = Parsed(overrides);
  const absl::Status status = NormaliseJobSpec(&spec);
  EXPECT_TRUE(status.ok() || absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

}  // namespace zeroshard
