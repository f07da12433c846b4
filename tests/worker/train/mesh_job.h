// A small job that every mesh of up to eight ranks can split, and what its numbers are compared by.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/worker/train/mesh_harness.h"

namespace zeroshard {

// Eight heads, an embedding, six blocks and a head; a vocabulary that only itself divides; three
// micro-batches of two sequences. `model`: gpt2 (tied), llama (key and value heads for two ranks,
// untied) or tied-llama.
//
// With such an eps AdamW is plain descent with momentum, by 3/10 of the gradient: weights show what
// gradients were, also their scale, and an element without a gradient does not turn the last bits
// of a sum into a step.
inline std::string MeshJob(const std::string& model) {
  const std::string of = model == "gpt2"
                             ? "architecture: gpt2"
                             : "architecture: llama, kv_heads: 2, intermediate_size: 96, "
                               "attention_bias: true, tie_embeddings: " +
                                   std::string(model == "llama" ? "false" : "true");
  return "name: mesh\nmodel: {" + of +
         ", hidden_size: 64, layers: 6, heads: 8, sequence_length: 12, vocab_size: 53}" + R"(
data: {train: [unused], tokenizer: tokens}
resources: {workers: 1}
train_batch_size: 6
train_micro_batch_size_per_gpu: 2
steps: 2
seed: 11
optimizer: {type: AdamW, params: {lr: 300, betas: [0.5, 0.9], eps: 1000, weight_decay: 1.0e-4}}
gradient_clipping: 1.0
zero_optimization: {stage: 0, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0}
)";
}

inline MemoryDataset MeshData(int32_t vocab = 53) {
  return MemoryDataset(ChainTokens(12 * 40 + 1, vocab), 12);
}

// All of a job's model; with `ends` alone those of embedding, first block, and head.
inline std::vector<std::string> TensorNames(const v1::JobSpec& spec, bool ends = false) {
  const ModelTable model = *MakeModelTable(spec.model());
  std::vector<std::string> names;
  for (size_t u = 0; u < model.units.size(); ++u) {
    if (ends && u > 1 && u + 1 < model.units.size()) continue;
    for (const ParameterInfo& info : model.units[u].parameters) names.push_back(info.name);
  }
  return names;
}

inline void ExpectNear(const std::vector<float>& seen, const std::vector<float>& wanted,
                       double tolerance, const std::string& name) {
  ASSERT_EQ(seen.size(), wanted.size()) << name;
  double largest = 0.1, off = 0;
  for (size_t i = 0; i < seen.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(wanted[i])));
    const double difference =
        std::abs(static_cast<double>(seen[i]) - static_cast<double>(wanted[i]));
    off = std::isfinite(difference) ? std::max(off, difference) : INFINITY;
  }
  EXPECT_LE(off, tolerance * largest) << name;
}

// Loss and norm, and of the weights, by name, these `tensors`.
inline void ExpectAgree(const std::vector<RankResult>& results, const RankResult& wanted,
                        const std::map<std::string, std::vector<float>>& weights,
                        const std::vector<std::string>& tensors, double tolerance) {
  for (const RankResult& result : results) {
    ASSERT_TRUE(result.status.ok()) << result.status;
    ASSERT_EQ(result.records.size(), wanted.records.size());
    for (size_t i = 0; i < wanted.records.size(); ++i) {
      const v1::StepRecord& seen = result.records[i];
      const v1::StepRecord& of = wanted.records[i];
      EXPECT_NEAR(seen.loss(), of.loss(), tolerance * of.loss()) << "step " << of.step();
      EXPECT_NEAR(seen.grad_norm(), of.grad_norm(), tolerance * of.grad_norm());
      EXPECT_EQ(seen.tokens(), of.tokens());
    }
    ASSERT_EQ(result.tensors.size(), tensors.size());
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    ExpectNear(results[0].tensors[i], weights.at(tensors[i]), tolerance, tensors[i]);
    for (const RankResult& result : results)
      EXPECT_EQ(result.tensors[i], results[0].tensors[i]) << tensors[i] << ": ranks disagree";
  }
}

// All shapes of so many ranks.
inline std::vector<MeshShape> ShapesOf(int ranks) {
  std::vector<MeshShape> shapes;
  for (int pipeline = 1; pipeline <= ranks; ++pipeline) {
    for (int tensor = 1; pipeline * tensor <= ranks; ++tensor) {
      if (ranks % (pipeline * tensor) == 0)
        shapes.push_back(
            {.pipeline = pipeline, .data = ranks / (pipeline * tensor), .tensor = tensor});
    }
  }
  return shapes;
}

inline std::string NameOf(const MeshShape& shape) {
  return absl::StrFormat("d%d_t%d_p%d", shape.data, shape.tensor, shape.pipeline);
}

}  // namespace zeroshard
