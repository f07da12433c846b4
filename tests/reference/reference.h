// Loads the values that make_reference.py wrote with PyTorch; its head says what each file holds.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/model_table.h"
#include "common/safetensors/safetensors.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// All cases of make_reference.py: what each covers is in the README.
std::vector<std::string> ReferenceNames();

class Reference {
 public:
  // `name`: one of ReferenceNames(), or gpt2_fp16 (make_fp16.py), which has no group "gradient".
  static absl::StatusOr<Reference> Load(const std::string& name);

  const v1::JobSpec& spec() const { return spec_; }
  const ModelTable& table() const { return table_; }

  // One tensor under "initial", "gradient" or "final". NOT_FOUND, or INVALID_ARGUMENT where its
  // size is not that of the table.
  absl::StatusOr<std::vector<float>> Tensor(const std::string& group,
                                            const std::string& name) const;
  // A unit's whole flat vector, its padding zero.
  absl::StatusOr<std::vector<float>> FlatUnit(const std::string& group,
                                              const UnitTable& unit) const;

  // "loss", "grad_norm", "learning_rate", "gradient.loss", "logits"; of gpt2_fp16 "loss_scale".
  absl::StatusOr<std::vector<float>> Floats(const std::string& name) const;
  // "tokens", "targets", "gradient.tokens", "gradient.targets", "logits.positions", and where
  // documents are masked "document_start", "gradient.document_start"; of gpt2_fp16 "skipped".
  absl::StatusOr<std::vector<int32_t>> Ints(const std::string& name) const;

 private:
  v1::JobSpec spec_;
  ModelTable table_;
  std::shared_ptr<const SafetensorsFile> file_;
};

}  // namespace zeroshard
