// Ranks of a mesh as threads, each with the engine of its slice and stages: for tests of what they
// hold, against one process that holds the same values.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/kernels/init.h"
#include "common/plan/pipeline_schedule.h"
#include "common/plan/pipeline_stages.h"
#include "common/plan/rank_mesh.h"
#include "common/plan/stage_model.h"
#include "gtest/gtest.h"
#include "worker/comm/communicator.h"
#include "worker/comm/memory_rendezvous.h"
#include "worker/comm/tensor_group.h"
#include "worker/zero/engine.h"
#include "worker/zero/sliced_source.h"

namespace zeroshard {

// Heads of 12: biases, and the 53 rows of the table, are torn in the middle of 64 elements. Of the
// llamas one has one key and value head for all ranks, "llama_untied" two for four. `frozen`: all
// but one MLP.
inline v1::ModelSpec SliceSpec(const std::string& name, bool frozen = false) {
  v1::ModelSpec spec;
  spec.set_hidden_size(48);
  spec.set_layers(2);
  spec.set_heads(4);
  spec.set_sequence_length(16);
  spec.set_vocab_size(53);
  spec.set_architecture(name == "gpt2" ? "gpt2" : "llama");
  if (name != "gpt2") {
    spec.set_kv_heads(name == "llama_untied" ? 2 : 1);
    spec.set_intermediate_size(96);
    spec.set_attention_bias(true);
    spec.set_mlp_bias(true);
    spec.set_tie_embeddings(name != "llama_untied");
  }
  if (frozen) spec.add_trainable("blocks.1.mlp.*");
  return spec;
}

// Values of a kind of state that tell tensor and element.
class StateValues : public ParameterSource {
 public:
  explicit StateValues(StateKind kind) : kind_(kind) {}
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override {
    InitNormal(5 + static_cast<uint64_t>(kind_), tensor.name, begin, end, 0.1f, out);
    if (kind_ == StateKind::kExpAvgSq)
      for (int64_t i = 0; i < end - begin; ++i) out[i] *= out[i];
    return absl::OkStatus();
  }

 private:
  const StateKind kind_;
};

using StateSource = std::function<std::unique_ptr<ParameterSource>(StateKind)>;
inline std::unique_ptr<ParameterSource> AnyState(StateKind kind) {
  return std::make_unique<StateValues>(kind);
}

// By kind and tensor, in full.
using FullState = std::map<std::pair<StateKind, std::string>, std::vector<float>>;

class SliceRank {
 public:
  // `options` without the world, which is the mesh's data dimension. A mesh of one tensor rank has
  // no slice, as a job without the key has none. `source` gives the values of a kind.
  SliceRank(const ModelTable& full, const MeshShape& mesh, int rank, ZeroOptions options,
            Rendezvous* rendezvous, const StateSource& source)
      : full_(full),
        position_(PositionOf(mesh, rank)),
        device_(MakeCpuDevice()),
        ops_(MakeCpuOps(1)),
        slice_(MakeTensorRank(full, mesh.tensor, position_.tensor)) {
    options.world = mesh.data;
    MakePolicy(mesh, options);
    Connect(mesh, rank, rendezvous);
    links_.job = job_.get();
    links_.pipeline = pipeline_.get();
    if (mesh.tensor > 1) links_.slice = &slice_;
    const auto master = source(StateKind::kMaster);
    const SlicedSource weights(&full_, &slice_, master.get());
    engine_ = *ZeroEngine::Create(&slice_.model, &policy_, 1, device_.get(), ops_.get(),
                                  data_.get(), nullptr, &weights, nullptr, &links_);
    for (const StateKind kind : {StateKind::kExpAvg, StateKind::kExpAvgSq}) {
      const auto values = source(kind);
      EXPECT_TRUE(engine_->LoadMoments(kind, SlicedSource(&full_, &slice_, values.get())).ok());
    }
  }

  ZeroEngine& engine() { return *engine_; }
  const TensorRank& slice() const { return slice_; }
  const ZeroPolicy& policy() const { return policy_; }
  Device* device() { return device_.get(); }
  Communicator* job() { return job_.get(); }

  // What it would save, with how often each element is saved.
  void Collect(FullState* state,
               std::map<std::pair<StateKind, std::string>, std::vector<int>>* times) const {
    for (const OwnedRange& range : engine_->OwnedRanges()) {
      const UnitTable& unit = full_.units[static_cast<size_t>(range.unit)];
      for (int kind = 0; kind < (range.trained ? kStateKinds : 1); ++kind) {
        const auto k = static_cast<StateKind>(kind);
        std::vector<float> values(static_cast<size_t>(range.size()));
        ASSERT_TRUE(engine_->CopyState(k, range.unit, range.begin, range.end, values.data()).ok());
        for (const ParameterInfo& tensor : unit.parameters) {
          const auto size = static_cast<size_t>(tensor.size);
          if (kind > 0 && !tensor.trainable) continue;
          std::vector<float>& to = (*state)[{k, tensor.name}];
          std::vector<int>& seen = (*times)[{k, tensor.name}];
          to.resize(size);
          seen.resize(size);
          for (int64_t i = 0; i < range.size(); ++i) {
            const int64_t element = range.flat + i - tensor.offset;
            if (element < 0 || element >= tensor.size) continue;
            to[static_cast<size_t>(element)] = values[static_cast<size_t>(i)];
            ++seen[static_cast<size_t>(element)];
          }
        }
      }
    }
  }

 private:
  void MakePolicy(const MeshShape& mesh, const ZeroOptions& options) {
    if (mesh.pipeline == 1) {
      policy_ = MakeZeroPolicy(slice_.model, options);
      return;
    }
    const PipelineStages stages =
        *CutStages(UnitCosts(full_.config, options.checkpointing), mesh.pipeline, 1);
    const StageModel stage = MakeStageModel(slice_.model, stages, position_.pipeline);
    const auto schedules = *MakePipelineSchedule(
        {.stages = mesh.pipeline, .virtual_stages = 1, .micro_batches = RoundsOf(options)});
    policy_ = MakeStagePolicy(stage, options, schedules[static_cast<size_t>(position_.pipeline)]);
    links_.tied_peer = stage.tied_peer;
    slice_.model = stage.model;
    for (size_t u = 0; u < slice_.slices.size(); ++u)
      slice_.slices[u].resize(slice_.model.units[u].parameters.size());
  }

  void Connect(const MeshShape& mesh, int rank, Rendezvous* rendezvous) {
    CommunicatorOptions job;
    job.rank = rank;
    job.size = mesh.Ranks();
    job.host = "127.0.0.1";
    job.connect_timeout = job.operation_timeout = absl::Seconds(60);
    const auto line = [&](const char* name, int index, std::vector<int> ranks) {
      return *MakeLineCommunicator(
          MeshLine{.dimension = name, .line = index, .ranks = std::move(ranks)}, job, rendezvous,
          device_.get(), [](const CommunicatorOptions& options, Rendezvous* keys, Device* on) {
            return MakeGlooCommunicator(options, keys, on);
          });
    };
    std::vector<int> all(static_cast<size_t>(mesh.Ranks()));
    for (int r = 0; r < mesh.Ranks(); ++r) all[static_cast<size_t>(r)] = r;
    job_ = line("job", 0, all);
    const int cell = position_.pipeline * mesh.tensor + position_.tensor;
    data_ = line("data", cell, LineOf(mesh, MeshDimension::kData, rank));
    pipeline_ = line("pipeline", position_.data * mesh.tensor + position_.tensor,
                     LineOf(mesh, MeshDimension::kPipeline, rank));
  }

  const ModelTable full_;
  const MeshPosition position_;
  const std::unique_ptr<Device> device_;
  const std::unique_ptr<Ops> ops_;
  TensorRank slice_;  // its model: of this rank's stages
  EngineLinks links_;
  ZeroPolicy policy_;
  std::unique_ptr<Communicator> job_, data_, pipeline_;
  std::unique_ptr<ZeroEngine> engine_;
};

// All ranks of a mesh.
class SliceMesh {
 public:
  SliceMesh(const ModelTable& full, const MeshShape& mesh, const ZeroOptions& options,
            const StateSource& source = AnyState)
      : ranks_(static_cast<size_t>(mesh.Ranks())) {
    Each([&](size_t rank) {
      ranks_[rank] = std::make_unique<SliceRank>(full, mesh, static_cast<int>(rank), options,
                                                 &rendezvous_, source);
    });
  }
  ~SliceMesh() {
    Each([&](size_t rank) { ranks_[rank].reset(); });
  }

  void Each(const std::function<void(size_t)>& body) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      threads.emplace_back([&body, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }
  SliceRank& operator[](size_t rank) { return *ranks_[rank]; }
  size_t size() const { return ranks_.size(); }

  // The same on all ranks.
  std::string WeightsDigest() {
    std::vector<std::string> digests(size());
    Each([&](size_t rank) {
      absl::StatusOr<std::string> digest = ranks_[rank]->engine().WeightsDigest();
      EXPECT_TRUE(digest.ok()) << digest.status();
      if (digest.ok()) digests[rank] = *digest;
    });
    for (const std::string& digest : digests) EXPECT_EQ(digest, digests[0]);
    return digests[0];
  }
  // By kind, a space behind each.
  std::string LoadedDigests() {
    std::vector<std::string> digests(size());
    Each([&](size_t rank) {
      const auto loaded = ranks_[rank]->engine().LoadedDigests();
      EXPECT_TRUE(loaded.ok()) << loaded.status();
      if (!loaded.ok()) return;
      for (const std::string& digest : *loaded) absl::StrAppend(&digests[rank], digest, " ");
    });
    for (const std::string& digest : digests) EXPECT_EQ(digest, digests[0]);
    return digests[0];
  }
  // What all of them would save; each element must be saved once.
  FullState Saved() {
    FullState state;
    std::map<std::pair<StateKind, std::string>, std::vector<int>> times;
    for (const auto& rank : ranks_) rank->Collect(&state, &times);
    for (const auto& [key, seen] : times)
      EXPECT_EQ(seen, std::vector<int>(seen.size(), 1)) << NameOf(key.first) << " " << key.second;
    return state;
  }

 private:
  MemoryRendezvous rendezvous_;
  std::vector<std::unique_ptr<SliceRank>> ranks_;
};

}  // namespace zeroshard
