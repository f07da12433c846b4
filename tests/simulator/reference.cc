#include "tests/simulator/reference.h"

#include <cstring>

#include "common/checkpoint/state_digest.h"
#include "common/spec/decision.h"
#include "tests/simulator/world.h"

namespace zeroshard::simulator {
namespace {

uint64_t BitsOf(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace

Reference::Reference(const v1::JobSpec& spec)
    : spec_(spec), model_(MakeModelTable(spec.model()).value()), table_(ChunkTable::Make(model_)) {
  std::vector<uint64_t> state;
  for (size_t chunk = 0; chunk < table_.chunks.size(); ++chunk) {
    state.push_back(Mix(spec.seed(), Mix(chunk, HashOf(spec.name()))));
  }
  states_.push_back(state);
  records_.emplace_back();
  for (uint64_t step = 1; step <= spec.steps(); ++step) {
    const uint64_t weights = HashOfWeights(state);
    v1::StepRecord& record = records_.emplace_back();
    record.set_step(step);
    record.set_loss(static_cast<double>(weights >> 40) * 1e-6);
    record.set_grad_norm(static_cast<double>(Mix(weights, step) >> 50) * 1e-3);
    record.set_learning_rate(1e-3);
    record.set_tokens(step % 5 == 3 ? 0 : 64 + weights % 7);
    const v1::StepDecision decision = Decision(step);
    for (size_t chunk = 0; chunk < state.size(); ++chunk) {
      if (!table_.chunks[chunk].trained) continue;
      const auto number = static_cast<uint32_t>(chunk);
      const auto size = static_cast<uint64_t>(table_.chunks[chunk].size());
      state[chunk] = Applied(
          state[chunk], decision,
          GradientPrefix(weights, step, number, size) - GradientPrefix(weights, step, number, 0));
    }
    states_.push_back(state);
  }
}

uint64_t Reference::GradientPrefix(uint64_t weights, uint64_t step, uint32_t chunk, uint64_t end) {
  return Mix(Mix(weights, step), Mix(chunk, end));
}

uint64_t Reference::HashOfWeights(const std::vector<uint64_t>& state) {
  uint64_t hash = state.size();
  for (const uint64_t chunk : state) hash = Mix(hash, chunk);
  return hash;
}

uint64_t Reference::Applied(uint64_t state, const v1::StepDecision& decision, uint64_t gradient) {
  if (decision.skip()) return state;
  return Mix(Mix(state, gradient),
             Mix(Mix(decision.step(), decision.adam_step()),
                 Mix(BitsOf(decision.multiplier()), BitsOf(decision.learning_rate()))));
}

v1::StepDecision Reference::Decision(uint64_t step) const {
  const v1::StepRecord& record = records_[step];
  v1::StepDecision decision = MakeDecision(spec_, step, record.grad_norm(), record.tokens());
  decision.set_next_sample(NextSample(step));
  return decision;
}

bool Reference::Evaluates(uint64_t step) const {
  const uint64_t interval = spec_.eval().interval_steps();
  return spec_.has_eval() && step != 0 && (step == spec_.steps() || step % interval == 0);
}

double Reference::EvalLoss(const std::vector<uint64_t>& state) {
  return static_cast<double>(Mix(HashOfWeights(state), 41) >> 40) * 1e-6;
}

uint64_t Reference::NextSample(uint64_t step) const { return step * spec_.train_batch_size(); }

uint64_t Reference::DigestLow(uint32_t chunk, uint64_t state) { return Mix(state, chunk); }
uint64_t Reference::DigestHigh(uint32_t chunk, uint64_t state) { return Mix(~state, chunk); }

std::string Reference::Digest() const {
  WeightDigest digest;
  for (size_t chunk = 0; chunk < states_.back().size(); ++chunk) {
    const auto number = static_cast<uint32_t>(chunk);
    digest.low += DigestLow(number, states_.back()[chunk]);
    digest.high += DigestHigh(number, states_.back()[chunk]);
  }
  return digest.Hex();
}

}  // namespace zeroshard::simulator
