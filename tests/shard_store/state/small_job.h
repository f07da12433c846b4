// Small jobs, and their state computed in another way: whole tensors with plain calls.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "common/checkpoint/manifest.h"
#include "common/kernels/adamw.h"
#include "common/kernels/convert.h"
#include "common/kernels/init.h"
#include "common/plan/chunk_table.h"
#include "common/rounding.h"
#include "common/safetensors/float_types.h"
#include "common/spec/job_spec.h"
#include "shard_store/state/job_state.h"
#include "tests/common/temp_folder.h"

namespace zeroshard::store {

inline constexpr uint64_t kPlenty = uint64_t{1} << 30;  // bytes
constexpr float kBeta1 = 0.9f, kBeta2 = 0.95f, kEps = 1e-8f, kDecay = 0.1f;

struct JobShape {
  bool bf16 = true;
  bool sgd = false;
  uint32_t hidden = 64;
  uint32_t vocab = 100;
  std::vector<std::string> trainable = {};
  uint64_t seed = 7;
  bool nvme = false;          // on the disk
  bool stochastic = false;    // rounding, in bf16
  uint32_t step_seconds = 0;  // the default
};

inline v1::JobSpec MakeSpec(const JobShape& shape) {
  v1::JobSpec spec;
  spec.set_name("small");
  v1::ModelSpec* model = spec.mutable_model();
  model->set_architecture("gpt2");
  model->set_hidden_size(shape.hidden);
  model->set_layers(1);
  model->set_heads(1);
  model->set_sequence_length(16);
  model->set_vocab_size(shape.vocab);
  for (const std::string& pattern : shape.trainable) model->add_trainable(pattern);
  spec.mutable_bf16()->set_enabled(shape.bf16);
  spec.mutable_bf16()->set_stochastic_rounding(shape.stochastic);
  spec.set_seed(shape.seed);
  spec.mutable_optimizer()->set_type(shape.sgd ? "SGD" : "AdamW");
  v1::OptimizerParams* params = spec.mutable_optimizer()->mutable_params();
  params->set_lr(0.01);
  params->set_weight_decay(kDecay);
  if (shape.sgd) {
    params->set_momentum(0.9);
  } else {
    params->add_betas(kBeta1);
    params->add_betas(kBeta2);
    params->set_eps(kEps);
  }
  spec.mutable_zero_optimization()->set_stage(2);
  spec.mutable_zero_optimization()->mutable_offload_optimizer()->set_device(shape.nvme ? "nvme"
                                                                                       : "cpu");
  spec.mutable_timeouts()->set_start_seconds(60);
  if (shape.step_seconds > 0) spec.mutable_timeouts()->set_step_seconds(shape.step_seconds);
  return spec;
}

// A folder for states on the disk and a limit that none of these jobs meets.
struct SmallDisk {
  MemoryFolder folder;
  MemoryBudget budget{uint64_t{1} << 32, "NVMe folder", "--nvme-limit"};

  NvmeStateOptions Options() {
    NvmeStateOptions options;
    options.dir = folder.path();
    options.budget = &budget;
    options.run_id = "run-small";
    return options;
  }
};

inline ModelTable MakeModel(const v1::JobSpec& spec) {
  absl::StatusOr<ModelTable> model = MakeModelTable(spec.model());
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? *std::move(model) : ModelTable();
}

inline std::map<uint32_t, Chunk> AllChunks(const ModelTable& model, int64_t chunk_elements) {
  std::map<uint32_t, Chunk> chunks;
  for (const Chunk& chunk : ChunkTable::Make(model, chunk_elements).chunks)
    chunks.emplace(static_cast<uint32_t>(chunks.size()), chunk);
  return chunks;
}

// So many that the block's last chunk has one element.
inline int64_t AllButOneOfTheBlock(const ModelTable& model) { return model.units[1].length - 1; }

inline v1::StepDecision Decision(uint64_t step, bool skip = false) {
  v1::StepDecision decision;
  decision.set_epoch(1);
  decision.set_step(step);
  decision.set_generation(1);
  decision.set_skip(skip);
  decision.set_multiplier(0.25f);
  decision.set_learning_rate(0.01f / static_cast<float>(step));
  decision.set_adam_step(step);
  return decision;
}

inline float FromBf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// The gradient of a unit's flat vector, padding included, in the wire type.
inline std::vector<char> GradientOf(const ModelTable& model, size_t unit, uint64_t step,
                                    bool bf16) {
  std::mt19937_64 random(step * 1000 + unit);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> values(static_cast<size_t>(model.units[unit].length));
  for (float& value : values) value = normal(random);
  std::vector<char> bytes(values.size() * (bf16 ? 2 : 4));
  if (bf16) {
    RoundToBf16(values.data(), static_cast<int64_t>(values.size()),
                reinterpret_cast<uint16_t*>(bytes.data()));
  } else {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  return bytes;
}

// The state of a whole model as flat vectors of units: what the store's must equal bit for bit.
class Reference {
 public:
  Reference(const ModelTable& model, const JobShape& shape) : model_(&model), shape_(shape) {
    const FreshWeights fresh(shape.seed);
    for (const UnitTable& unit : model.units) {
      const auto length = static_cast<size_t>(unit.length);
      for (auto& kind : state_) kind.emplace_back(length, 0.0f);
      for (const ParameterInfo& tensor : unit.parameters) {
        EXPECT_TRUE(
            fresh.Read(tensor, 0, tensor.size, state_[0].back().data() + tensor.offset).ok());
      }
      if (shape.bf16 && !unit.AnyTrainable())  // only the rounded values are kept
        for (float& value : state_[0].back()) value = FromBf16(Rounded(value));
    }
  }

  void Step(const v1::StepDecision& decision) {
    if (decision.skip()) return;
    for (size_t u = 0; u < model_->units.size(); ++u) {
      const std::vector<char> gradient = GradientOf(*model_, u, decision.step(), shape_.bf16);
      for (const ParameterInfo& tensor : model_->units[u].parameters)
        if (tensor.trainable) StepTensor(decision, u, tensor, gradient);
    }
  }

  const std::vector<float>& Values(StateKind kind, int unit) const {
    return state_[static_cast<int>(kind)][static_cast<size_t>(unit)];
  }
  // As workers pull them.
  std::vector<char> Parameters(const Chunk& chunk) const {
    const float* values = Values(StateKind::kMaster, chunk.unit).data() + chunk.begin;
    std::vector<char> bytes(static_cast<size_t>(chunk.size()) * (shape_.bf16 ? 2 : 4));
    if (shape_.bf16) {
      Rounding rounding;
      rounding.stochastic = shape_.stochastic;
      rounding.seed = shape_.seed;
      cpu::RoundParameters(values, chunk.size(), rounding.At(chunk.unit, chunk.begin), bytes.data(),
                           DType::kBF16, 1);
    } else {
      std::memcpy(bytes.data(), values, bytes.size());
    }
    return bytes;
  }

 private:
  static uint16_t Rounded(float value) {
    uint16_t bits = 0;
    RoundToBf16(&value, 1, &bits);
    return bits;
  }

  void StepTensor(const v1::StepDecision& decision, size_t unit, const ParameterInfo& tensor,
                  const std::vector<char>& gradient) {
    float* p = state_[0][unit].data() + tensor.offset;
    float* m = state_[1][unit].data() + tensor.offset;
    float* v = state_[2][unit].data() + tensor.offset;
    const char* g = gradient.data() + tensor.offset * (shape_.bf16 ? 2 : 4);
    const DType type = shape_.bf16 ? DType::kBF16 : DType::kF32;
    const float decay = tensor.decay ? kDecay : 0.0f;
    if (!shape_.sgd) {
      AdamWArgs args;
      args.learning_rate = decision.learning_rate();
      args.beta1 = kBeta1;
      args.beta2 = kBeta2;
      args.eps = kEps;
      args.weight_decay = decay;
      args.grad_scale = decision.multiplier();
      args.t = static_cast<int64_t>(decision.adam_step());
      cpu::AdamW(args, tensor.size, g, type, p, m, v, p, DType::kF32, 1);
      return;
    }
    for (int64_t i = 0; i < tensor.size; ++i) {
      float grad = 0;
      if (shape_.bf16) {
        uint16_t bits = 0;
        std::memcpy(&bits, g + 2 * i, 2);
        grad = FromBf16(bits);
      } else {
        std::memcpy(&grad, g + 4 * i, 4);
      }
      const float scaled = std::fma(p[i], decay, grad * decision.multiplier());
      const float kept = m[i] * 0.9f;
      m[i] = kept + scaled;
      p[i] = std::fma(-decision.learning_rate(), m[i], p[i]);
    }
  }

  const ModelTable* model_;
  JobShape shape_;
  std::vector<std::vector<float>> state_[kStateKinds];  // by kind and unit
};

// Everything of `chunk`, as the state has it and as it should be.
inline testing::AssertionResult ChunkEquals(JobState* state, const Reference& wanted, uint32_t id,
                                            const Chunk& chunk) {
  for (int k = 0; k < kStateKinds; ++k) {
    const auto kind = static_cast<StateKind>(k);
    if (!state->HasKind(id, kind)) continue;
    std::vector<float> seen(static_cast<size_t>(chunk.size()));
    const absl::Status status = state->GetState(id, kind, 0, absl::MakeSpan(seen));
    if (!status.ok()) return testing::AssertionFailure() << status;
    const float* values = wanted.Values(kind, chunk.unit).data() + chunk.begin;
    for (size_t i = 0; i < seen.size(); ++i) {
      if (std::memcmp(&seen[i], &values[i], sizeof(float)) == 0) continue;
      return testing::AssertionFailure() << NameOf(kind) << " of chunk " << id << " element " << i
                                         << " is " << seen[i] << ", wanted " << values[i];
    }
  }
  const auto parameters = state->Parameters(id, 0, chunk.size());
  if (!parameters.ok()) return testing::AssertionFailure() << parameters.status();
  const std::vector<char> bytes = wanted.Parameters(chunk);
  if (parameters->bytes != absl::MakeConstSpan(bytes))
    return testing::AssertionFailure() << "the parameters of chunk " << id << " are others";
  return testing::AssertionSuccess();
}

inline testing::AssertionResult StateEquals(JobState* state, const Reference& wanted,
                                            const std::map<uint32_t, Chunk>& chunks) {
  for (const auto& [id, chunk] : chunks) {
    testing::AssertionResult result = ChunkEquals(state, wanted, id, chunk);
    if (!result) return result;
  }
  return testing::AssertionSuccess();
}

}  // namespace zeroshard::store
