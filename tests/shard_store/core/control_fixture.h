// A control with a small job, and the directives and frames that it is driven with.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "shard_store/core/job_control.h"

namespace zeroshard::store {

// Three units of one chunk each unless `chunk_elements` says otherwise.
inline v1::JobSpec SmallSpec() {
  v1::JobSpec spec;
  spec.set_name("small");
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_architecture("gpt2");
  model.set_hidden_size(8);
  model.set_layers(1);
  model.set_heads(1);
  model.set_sequence_length(8);
  model.set_vocab_size(16);
  return spec;
}

inline size_t TableSize(const v1::JobSpec& spec, int64_t chunk_elements = kChunkElements) {
  return ChunkTable::Make(*MakeModelTable(spec.model()), chunk_elements).chunks.size();
}

inline v1::StepDecision Decided(uint64_t epoch, uint64_t step, uint64_t generation) {
  v1::StepDecision decision;
  decision.set_epoch(epoch);
  decision.set_step(step);
  decision.set_generation(generation);
  decision.set_multiplier(0.5f);
  decision.set_learning_rate(1e-3f);
  decision.set_adam_step(step);
  return decision;
}

// The directive that puts every chunk on store 0, at step 0 of epoch 1.
inline v1::StoreDirective Opening(v1::JobSpec spec = SmallSpec(),
                                  int64_t chunk_elements = kChunkElements) {
  v1::StoreDirective directive;
  directive.set_term(1);
  directive.set_run_id("small-1");
  directive.set_generation(1);
  directive.set_epoch(1);
  directive.set_map_version(1);
  v1::StoreJob& job = *directive.mutable_job();
  job.set_job("small");
  *job.mutable_spec() = spec;
  job.mutable_map()->add_stores()->set_member("store-0");
  job.mutable_map()->set_replicas(1);
  for (size_t chunk = 0; chunk < TableSize(spec, chunk_elements); ++chunk) {
    job.mutable_map()->add_placement(0);
  }
  job.mutable_base()->set_epoch(1);
  return directive;
}

// The same with these stores, chunk by chunk; the control is store 0.
inline v1::StoreDirective OpeningOn(const std::vector<std::vector<uint32_t>>& placement,
                                    uint32_t stores) {
  v1::StoreDirective directive = Opening();
  v1::StoreMap& map = *directive.mutable_job()->mutable_map();
  while (static_cast<uint32_t>(map.stores_size()) < stores) map.add_stores();
  map.set_replicas(static_cast<uint32_t>(placement.front().size()));
  map.clear_placement();
  for (const std::vector<uint32_t>& replicas : placement) {
    for (const uint32_t store : replicas) map.add_placement(store);
  }
  return directive;
}

class ControlTest : public testing::Test {
 protected:
  // It must be followed.
  Orders Say(const v1::StoreDirective& directive) {
    absl::StatusOr<Orders> orders = control_.OnDirective(directive);
    EXPECT_TRUE(orders.ok()) << orders.status();
    return orders.ok() ? *std::move(orders) : Orders();
  }
  // It must be refused and change nothing.
  absl::Status Refusal(const v1::StoreDirective& directive) {
    const std::string before = control_.report().SerializeAsString();
    const absl::Status status = control_.OnDirective(directive).status();
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(control_.report().SerializeAsString(), before);
    return status;
  }
  void Open(const v1::StoreDirective& directive = Opening()) {
    EXPECT_TRUE(Say(directive).load);
    control_.OnLoaded(absl::OkStatus());
    EXPECT_EQ(control_.report().phase(), v1::STORE_PHASE_READY);
    now_ = directive;
  }
  absl::Status Push(uint64_t step, uint32_t chunk, uint32_t begin, uint32_t count) {
    return control_.OnStaged(now_.generation(), now_.epoch(), step, chunk, begin, count);
  }
  // Every gradient of a step.
  void PushAll(uint64_t step) {
    for (const auto& [number, chunk] : control_.chunks()) {
      if (!chunk.trained) continue;
      const auto size = static_cast<uint32_t>(chunk.size());
      EXPECT_TRUE(Push(step, number, 0, size).ok());
    }
    EXPECT_EQ(control_.report().sealed_step(), step);
  }
  // The decision of a step in the generation that is open.
  v1::StoreDirective Decide(uint64_t step) {
    *now_.mutable_decision() = Decided(now_.epoch(), step, now_.generation());
    return now_;
  }
  void FinishApply() {
    for (const auto& [number, chunk] : control_.chunks()) {
      if (chunk.trained) control_.OnChunkApplied(number, 100 + number);
    }
    control_.OnApplied(absl::OkStatus());
  }
  void DoStep(uint64_t step) {
    PushAll(step);
    EXPECT_TRUE(Say(Decide(step)).apply.has_value());
    FinishApply();
    EXPECT_EQ(Version(), step);
  }
  uint64_t Version() const { return control_.report().version().step(); }
  v1::StorePhase Phase() const { return control_.report().phase(); }

  JobControl control_{"small-1"};
  v1::StoreDirective now_;  // the directive that was said last
};

}  // namespace zeroshard::store
