// A training run of tests/reference as a job of this trainer: its data, weights and specification.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/reference/reference.h"
#include "tests/worker/train/cluster_harness.h"

namespace zeroshard {

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

inline std::vector<std::string> TensorNames(const ModelTable& table) {
  std::vector<std::string> names;
  for (const UnitTable& unit : table.units)
    for (const ParameterInfo& p : unit.parameters) names.push_back(p.name);
  return names;
}

inline v1::JobSpec ReferenceJob(const Reference& reference, int world, int stage) {
  v1::JobSpec spec = reference.spec();
  spec.mutable_data()->add_train("unused");
  spec.mutable_data()->set_tokenizer("tokens");
  spec.mutable_resources()->set_workers(static_cast<uint32_t>(world));
  spec.mutable_zero_optimization()->set_stage(static_cast<uint32_t>(stage));
  spec.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  if (spec.seed() == 0) spec.set_seed(3);  // else the one its masks were drawn from
  const absl::Status status = NormaliseJobSpec(&spec);
  EXPECT_TRUE(status.ok()) << status;
  return spec;
}

// Begins with the reference's weights, ends with every tensor's. The reference must stay.
inline RunOptions ReferenceRun(const Reference& reference, int world) {
  RunOptions options{.world = world};
  options.tensors = TensorNames(reference.table());
  options.prepare = [&reference, tensors = options.tensors](int, Trainer* trainer) -> absl::Status {
    for (const std::string& tensor : tensors) {
      auto values = reference.Tensor("initial", tensor);
      if (!values.ok()) return values.status();
      const absl::Status status = trainer->SetTensor(tensor, *values);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  return options;
}

}  // namespace zeroshard
