// A job file is refused, or it is filled in once and for all and its canonical text gives it back.
#include <google/protobuf/util/message_differencer.h>

#include <cstdio>
#include <cstdlib>

#include "common/spec/job_spec.h"
#include "tests/fuzz/fuzz_target.h"

namespace zeroshard {
namespace {

using google::protobuf::util::MessageDifferencer;

void Require(bool condition, const char* what, const v1::JobSpec& spec) {
  if (condition) return;
  std::fprintf(stderr, "%s:\n%s\n", what, spec.DebugString().c_str());
  std::abort();
}

void CheckText(const v1::JobSpec& spec) {
  const absl::StatusOr<v1::JobSpec> again = ParseJobSpec(FormatJobSpec(spec), "canonical");
  Require(again.ok(), again.ok() ? "" : std::string(again.status().message()).c_str(), spec);
  Require(MessageDifferencer::Equals(spec, *again), "the canonical text is another job", spec);
}

}  // namespace

std::vector<std::string> FuzzSeeds() {
  return {
      R"(name: licences
model: {architecture: gpt2, hidden_size: 128, layers: 4, heads: 4, sequence_length: 128, vocab_size: 256}
data: {train: [/usr/share/common-licenses], tokenizer: bytes}
resources: {workers: 2, min_workers: 1}
train_batch_size: 32
train_micro_batch_size_per_gpu: 8
steps: 200
seed: 1
optimizer: {type: AdamW, params: {lr: 1.0e-3, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.1}}
scheduler: {type: cosine, params: {warmup_steps: 20, min_lr: 1.0e-4}}
gradient_clipping: 1.0
bf16: {enabled: true}
zero_optimization: {stage: 3, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0}
checkpoint: {dir: checkpoints, interval_steps: 50, keep_last: 2}
)",
      R"({"name": "tuned", "model": {"init_from": "model"},
 "data": {"train": ["a.jsonl", "b"], "tokenizer": "model/tokenizer.json", "format": "jsonl",
          "packing": {"mask_documents": true, "separator": 2}},
 "eval": {"data": ["val"], "interval_steps": 10, "batches": 3},
 "sample": {"interval_steps": 5, "prompts": ["The ", "\u00e9"], "temperature": 0.7, "top_k": 40},
 "resources": {"workers": 1}, "gradient_accumulation_steps": 2,
 "train_micro_batch_size_per_gpu": 1, "steps": 3, "seed": 18446744073709551615,
 "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1, "total_num_steps": 3}}})",
      R"(name: anchors
model: &m {architecture: llama, hidden_size: 64, layers: 1, heads: 4, kv_heads: 2, head_dim: 16,
  sequence_length: 8, vocab_size: 300, rope_scaling: {rope_type: linear, factor: 2}}
data: {train: ["x"], tokenizer: tokens, format: megatron}
resources: {workers: 1}
train_batch_size: 1
steps: !!int 1
)",
  };
}

}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace zeroshard;
  const std::string text(reinterpret_cast<const char*>(data), size);
  absl::StatusOr<v1::JobSpec> spec = ParseJobSpec(text, "input");
  if (!spec.ok()) return 0;
  CheckText(*spec);
  if (!NormaliseJobSpec(&*spec).ok()) return 0;
  CheckText(*spec);
  v1::JobSpec again = *spec;
  Require(NormaliseJobSpec(&again).ok(), "what was accepted once is refused", again);
  Require(MessageDifferencer::Equals(*spec, again), "filling in twice changes something", again);
  return 0;
}
