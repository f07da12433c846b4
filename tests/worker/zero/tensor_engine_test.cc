// The engine over slices of a model: ranks as a mesh data x tensor against one process.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/kernels/init.h"
#include "common/plan/rank_mesh.h"
#include "common/status_macros.h"
#include "gtest/gtest.h"
#include "worker/comm/memory_rendezvous.h"
#include "worker/comm/tensor_group.h"
#include "worker/model/unit.h"
#include "worker/zero/engine.h"
#include "worker/zero/sliced_source.h"

namespace zeroshard {
namespace {

constexpr int64_t kMicroBatches = 3;  // with two data ranks the last round is ragged
constexpr int64_t kSequences = 2;
constexpr int kSteps = 3;

struct MeshCase {
  std::string model;
  int data = 1, tensor = 2, stage = 0;
  bool sequence_parallel = false;
};
void PrintTo(const MeshCase& c, std::ostream* out) { *out << c.model << " at stage " << c.stage; }

v1::ModelSpec SpecOf(const std::string& model) {
  v1::ModelSpec spec;
  spec.set_hidden_size(64);
  spec.set_layers(2);
  spec.set_heads(4);
  spec.set_sequence_length(16);
  spec.set_vocab_size(53);
  spec.set_architecture(model);
  if (model == "llama") {
    spec.set_kv_heads(1);
    spec.set_intermediate_size(96);
    spec.set_attention_bias(true);
    spec.set_mlp_bias(true);
  }
  return spec;
}

// Biases that are not zero, so that none counts twice unseen.
class AnyWeights : public ParameterSource {
 public:
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override {
    InitNormal(5, tensor.name, begin, end, 0.1f, out);
    if (tensor.init == InitKind::kOnes) {
      for (int64_t i = 0; i < end - begin; ++i) out[i] += 1;
    }
    return absl::OkStatus();
  }
};

// One rank of a mesh, whose tensor and data lines are communicators.
class MeshRank {
 public:
  MeshRank(const ModelTable& full, const MeshShape& mesh, int rank, int stage,
           Rendezvous* rendezvous)
      : full_(full),
        position_(PositionOf(mesh, rank)),
        device_(MakeCpuDevice()),
        ops_(MakeCpuOps(1)),
        slice_(MakeTensorRank(full, mesh.tensor, position_.tensor)) {
    policy_ = MakeZeroPolicy(slice_.model, {.stage = stage,
                                            .world = mesh.data,
                                            .micro_batch = kSequences,
                                            .micro_batches = kMicroBatches,
                                            .persistence_threshold = 0,
                                            .max_reuse_distance = 0});
    Connect(mesh, rank, rendezvous);
    values_ = std::make_unique<SlicedSource>(&full_, &slice_, &weights_);
    engine_ = *ZeroEngine::Create(&slice_.model, &policy_, 1, device_.get(), ops_.get(),
                                  data_.get(), nullptr, values_.get(), nullptr, &links_);
    model_ = MakeModel(slice_, /*checkpointing=*/false, group_.get());
    const ModelConfig& c = slice_.model.config;
    boundary_ = kSequences * c.sequence * c.hidden;
    for (const UnitTable& unit : slice_.model.units) {
      const ActivationTable table =
          MakeActivationTable(c, unit.kind, kSequences, DType::kF32, false);
      kept_.push_back(Memory(static_cast<size_t>(table.kept_bytes)));
      scratch_ = std::max(scratch_, table.scratch_bytes);
    }
    shared_ = Memory(static_cast<size_t>(scratch_));
    gradient_ = Memory(static_cast<size_t>(boundary_) * sizeof(float));
  }

  // Its micro-batches of a step; `of(j)` are the tokens of micro-batch j, whose targets are the
  // next ones. The squares of what it is home of.
  absl::StatusOr<NormAccumulator> Gradients(
      uint64_t step, const std::function<std::vector<int32_t>(int64_t)>& of) {
    engine_->BeginStep(step);
    for (int64_t round = 0; round < policy_.rounds; ++round) {
      engine_->BeginRound(round);
      const int64_t j = round * policy_.options.world + position_.data;
      // A rank without a micro-batch runs on any tokens.
      ZS_RETURN_IF_ERROR(ForwardBackward(of(std::min(j, kMicroBatches - 1)), step));
    }
    std::string nonfinite;
    return engine_->FinishGradients(&nonfinite);
  }

  // Its part of the master weights, into the full tensors.
  void CollectWeights(std::map<std::string, std::vector<float>>* full) const {
    for (size_t unit = 0; unit < full_.units.size(); ++unit) {
      const ShardLayout& layout = policy_.layouts[unit];
      const ElementRange range{layout.Begin(position_.data), layout.End(position_.data)};
      std::vector<float> values(static_cast<size_t>(range.size()));
      ASSERT_TRUE(engine_
                      ->CopyState(StateKind::kMaster, static_cast<int>(unit), range.begin,
                                  range.end, values.data())
                      .ok());
      for (const SliceRun& run : FullRuns(slice_, unit, {range.begin, range.end})) {
        const ParameterInfo& p = full_.units[unit].parameters[static_cast<size_t>(run.parameter)];
        std::vector<float>& to = (*full)[p.name];
        to.resize(static_cast<size_t>(p.size), std::nanf(""));
        for (int64_t i = 0; i < run.size; ++i) {
          float& seen = to[static_cast<size_t>(run.element + i)];
          const float value = values[static_cast<size_t>(run.local - range.begin + i)];
          // Copies stay equal, step after step.
          if (!std::isnan(seen)) {
            ASSERT_EQ(seen, value) << p.name;
          }
          seen = value;
        }
      }
    }
  }

  ZeroEngine& engine() { return *engine_; }
  double loss() const { return loss_; }

 private:
  Buffer Memory(size_t bytes) { return *device_->Allocate(bytes, MemoryKind::kBuffers); }

  void Connect(const MeshShape& mesh, int rank, Rendezvous* rendezvous) {
    CommunicatorOptions job;
    job.rank = rank;
    job.size = mesh.Ranks();
    job.host = "127.0.0.1";
    job.connect_timeout = job.operation_timeout = absl::Seconds(60);
    const CommunicatorMaker make = [](const CommunicatorOptions& options, Rendezvous* keys,
                                      Device* on) {
      return MakeGlooCommunicator(options, keys, on);
    };
    const auto line = [&](MeshDimension dimension, const char* name, int index) {
      return MeshLine{.dimension = name, .line = index, .ranks = LineOf(mesh, dimension, rank)};
    };
    if (mesh.tensor > 1) {
      const UnitTable& block = full_.units[1];
      const auto k = static_cast<size_t>(block.Find("attn.k.weight") - block.parameters.data());
      lines_ = *MakeTensorLines(line(MeshDimension::kTensor, "tensor", position_.data),
                                slice_.slices[1][k].copies, job, rendezvous, device_.get(), make);
      group_ =
          std::make_unique<TensorGroup>(lines_.line.get(), lines_.copies.get(), device_->compute());
    }
    data_ = *MakeLineCommunicator(line(MeshDimension::kData, "data", position_.tensor), job,
                                  rendezvous, device_.get(), make);
  }

  UnitContext Context(size_t unit) const {
    return {ops_.get(), DType::kF32, kept_[unit].data(), shared_.data()};
  }

  absl::Status ForwardBackward(const std::vector<int32_t>& tokens, uint64_t step) {
    std::vector<int32_t> targets(tokens.begin() + 1, tokens.end());
    targets.push_back(-1);
    MicroBatch mb;
    mb.batch = kSequences;
    mb.tokens = tokens.data();
    mb.targets = targets.data();
    mb.step = step;
    const int last = static_cast<int>(slice_.model.units.size()) - 1;
    for (int u = 0; u < last; ++u) {
      ZS_ASSIGN_OR_RETURN(const UnitParameters p, engine_->BeforeForward(u));
      const auto unit = static_cast<size_t>(u);
      void* out = kept_[unit + 1].data();
      ZS_RETURN_IF_ERROR(u == 0 ? model_.embedding->Forward(Context(0), p.own, mb, out)
                                : model_.blocks[unit - 1]->Forward(Context(unit), p.own, mb,
                                                                   kept_[unit].data(), out));
      ZS_RETURN_IF_ERROR(engine_->AfterForward(u));
    }
    ZS_ASSIGN_OR_RETURN(const UnitParameters head, engine_->BeforeForward(last));
    void* const d = gradient_.data();
    ZS_RETURN_IF_ERROR(model_.head->LossAndBackward(
        Context(static_cast<size_t>(last)), head.own, head.lm_head, mb,
        kept_[static_cast<size_t>(last)].data(), d, engine_->Sink(last),
        engine_->Sink(engine_->HeadMatrixUnit()), engine_->HeadMatrixOffset(), &loss_));
    ZS_RETURN_IF_ERROR(engine_->AfterBackward(last));
    for (int u = last - 1; u > 0; --u) {
      ZS_ASSIGN_OR_RETURN(const UnitParameters p, engine_->BeforeBackward(u));
      const auto unit = static_cast<size_t>(u);
      ZS_RETURN_IF_ERROR(model_.blocks[unit - 1]->Backward(
          Context(unit), p.own, mb, kept_[unit].data(), d, d, engine_->Sink(u)));
      ZS_RETURN_IF_ERROR(engine_->AfterBackward(u));
    }
    ZS_RETURN_IF_ERROR(model_.embedding->Backward(Context(0), mb, d, engine_->rows()->ids(),
                                                  engine_->rows()->rows(), engine_->Sink(0)));
    return engine_->AfterBackward(0);
  }

  const ModelTable full_;
  const MeshPosition position_;
  const std::unique_ptr<Device> device_;
  const std::unique_ptr<Ops> ops_;
  const TensorRank slice_;
  const EngineLinks links_{.slice = &slice_};
  const AnyWeights weights_;
  ZeroPolicy policy_;
  TensorLines lines_;
  std::unique_ptr<TensorGroup> group_;
  std::unique_ptr<Communicator> data_;
  std::unique_ptr<SlicedSource> values_;
  std::unique_ptr<ZeroEngine> engine_;
  Model model_;
  int64_t boundary_ = 0, scratch_ = 0;
  std::vector<Buffer> kept_;
  Buffer shared_, gradient_;
  double loss_ = 0;
};

// Tokens of micro-batch j of a step.
std::vector<int32_t> TokensOf(const ModelConfig& c, uint64_t step, int64_t j) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < kSequences * c.sequence; ++i)
    tokens.push_back(
        static_cast<int32_t>((i * i * 7 + 31 * j + 11 * static_cast<int64_t>(step)) % c.vocab));
  return tokens;
}

struct Outcome {
  std::vector<double> norms;                          // of the steps
  std::map<std::string, std::vector<float>> weights;  // afterwards
  double loss = 0;
};

Outcome Train(const ModelTable& full, const MeshShape& mesh, int stage) {
  MemoryRendezvous rendezvous;
  std::vector<std::unique_ptr<MeshRank>> ranks(static_cast<size_t>(mesh.Ranks()));
  const auto each = [&](const std::function<void(size_t)>& body) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      threads.emplace_back([&body, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  };
  each([&](size_t rank) {
    ranks[rank] =
        std::make_unique<MeshRank>(full, mesh, static_cast<int>(rank), stage, &rendezvous);
  });
  Outcome outcome;
  for (int step = 1; step <= kSteps; ++step) {
    std::vector<NormAccumulator> squares(ranks.size());
    each([&](size_t rank) {
      const auto of = [&](int64_t j) {
        return TokensOf(full.config, static_cast<uint64_t>(step), j);
      };
      absl::StatusOr<NormAccumulator> own = ranks[rank]->Gradients(static_cast<uint64_t>(step), of);
      EXPECT_TRUE(own.ok()) << own.status();
      if (own.ok()) squares[rank] = *own;
    });
    NormAccumulator norm;
    for (const NormAccumulator& own : squares) norm.Add(own);
    outcome.norms.push_back(std::sqrt(norm.Value()));
    // An eps that rounding's share of a gradient near zero does not reach.
    AdamWArgs args{.learning_rate = 0.01f, .eps = 0.01f, .weight_decay = 0.1f, .t = step};
    args.grad_scale = 1.0f / static_cast<float>(kMicroBatches * kSequences);
    each([&](size_t rank) {
      EXPECT_TRUE(ranks[rank]->engine().Update(args).ok());
      EXPECT_TRUE(ranks[rank]->engine().Drain().ok());
    });
  }
  for (const auto& rank : ranks) rank->CollectWeights(&outcome.weights);
  outcome.loss = ranks[0]->loss();
  each([&](size_t rank) { ranks[rank].reset(); });
  return outcome;
}

double Norm(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

class TensorEngineTest : public testing::TestWithParam<MeshCase> {};

std::vector<MeshCase> MeshCases() {
  std::vector<MeshCase> cases;
  for (const char* model : {"gpt2", "llama"}) {
    for (int stage = 0; stage <= 3; ++stage) {
      cases.push_back({model, 2, 2, stage});
      if (stage == 0 || stage == 3) cases.push_back({model, 1, 4, stage});
      if (stage >= 2) cases.push_back({model, 4 - stage, 2, stage, /*sequence_parallel=*/true});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Meshes, TensorEngineTest, testing::ValuesIn(MeshCases()),
                         [](const auto& info) {
                           const MeshCase& c = info.param;
                           return absl::StrCat(c.model, "_data", c.data, "_tensor", c.tensor,
                                               "_stage", c.stage,
                                               c.sequence_parallel ? "_sequence" : "");
                         });

TEST_P(TensorEngineTest, NormsAndWeightsAreThoseOfOneProcess) {
  const MeshCase& c = GetParam();
  ModelTable full = *MakeModelTable(SpecOf(c.model));
  full.config.sequence_parallel = c.sequence_parallel;
  const Outcome alone = Train(full, {}, c.stage);
  const Outcome mesh = Train(full, {.pipeline = 1, .data = c.data, .tensor = c.tensor}, c.stage);
  for (int step = 0; step < kSteps; ++step) {
    const auto s = static_cast<size_t>(step);
    EXPECT_NEAR(mesh.norms[s], alone.norms[s], 1e-5 * alone.norms[s]) << step;
  }
  ASSERT_EQ(mesh.weights.size(), alone.weights.size());
  for (const auto& [name, wanted] : alone.weights) {
    const std::vector<float>& seen = mesh.weights.at(name);
    ASSERT_EQ(seen.size(), wanted.size()) << name;
    std::vector<float> error = seen;
    for (size_t i = 0; i < error.size(); ++i) error[i] -= wanted[i];
    EXPECT_LE(Norm(error), 1e-5 * Norm(wanted)) << name;
  }
}

}  // namespace
}  // namespace zeroshard
