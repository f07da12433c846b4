// The job specification as a file: reading it strictly, filling it in, checking it, writing it.
// The schema is proto/zeroshard/v1/job.proto alone; field names are the keys. Pure functions,
// thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// Reads YAML or JSON (which YAML contains) and then applies the overrides in order. An override is
// `key.path=value`: the value is YAML (`steps=20`, `optimizer.params.betas=[0.9, 0.95]`), a number
// in the path is the index of a list's element, and the index one past the end appends.
// `source_name` is what messages call the text. Nothing is defaulted and no relation is checked:
// that is NormaliseJobSpec's part.
//
// INVALID_ARGUMENT lists up to ten problems, one a line, each as "source:line:column: key.path:
// what is wrong": a key that does not exist (with the nearest that does), a key of DeepSpeed's that
// is not supported, the value `auto`, a key given twice, a value of another type.
// RESOURCE_EXHAUSTED: the text is longer than 1 MiB, or its aliases expand to more than 100,000
// values or 4 MiB.
absl::StatusOr<v1::JobSpec> ParseJobSpec(absl::string_view text, absl::string_view source_name,
                                         absl::Span<const std::string> overrides = {});

// Fills in every default except the model's (common/plan does that) and checks every value and
// every relation. Idempotent. Afterwards all three batch sizes, all parameters of the scheduler's
// type, all thresholds and timeouts are set. INVALID_ARGUMENT names the key, the value seen, the
// value wanted.
absl::Status NormaliseJobSpec(v1::JobSpec* spec);

// Canonical YAML: only what is set, in the schema's order, numbers in shortest round-trip form.
// ParseJobSpec gives the same message back.
std::string FormatJobSpec(const v1::JobSpec& spec);

// True where data.tokenizer names a file or folder rather than bytes or tokens: it has a / or a .
inline bool IsTokenizerPath(const std::string& tokenizer) {
  return tokenizer.find_first_of("/.") != std::string::npos;
}

// Micro-batches of one step over all ranks: train_batch_size / train_micro_batch_size_per_gpu.
// Of a normalised specification.
inline uint64_t MicroBatchesPerStep(const v1::JobSpec& spec) {
  return spec.train_batch_size() / spec.train_micro_batch_size_per_gpu();
}

}  // namespace zeroshard
