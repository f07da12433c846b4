// One sequence that grows: runs the model's units over new tokens, with the keys and values of all
// earlier ones in a cache. Knows neither text nor sampling. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/device/device.h"
#include "worker/generate/parameter_lender.h"
#include "worker/model/unit.h"
#include "worker/ops/ops.h"

namespace zeroshard {

class Generator {
 public:
  // For sequences of up to `capacity` positions; the pointers outlive the generator.
  // INVALID_ARGUMENT where the model has fewer positions (Positions), RESOURCE_EXHAUSTED names the
  // bytes.
  static absl::StatusOr<std::unique_ptr<Generator>> Create(const Model* model, Device* device,
                                                           Ops* ops, DType dtype, int64_t capacity);
  // What Create allocates: cache, activations and logits.
  static int64_t Bytes(const ModelConfig& config, DType dtype, int64_t capacity);
  // The most positions that a sequence of this model can have.
  static int64_t Positions(const ModelConfig& config);

  // Runs the model over `tokens`, the next of the sequence (at least one), and returns the fp32
  // logits [V] of what follows the last; they are valid until the next call. A long run of tokens
  // takes several passes, how many depends on its length alone. INVALID_ARGUMENT: an id that the
  // vocabulary does not have; OUT_OF_RANGE: no room; or the lender's, the units' or the
  // device's error, after which the sequence is undefined until Reset.
  absl::StatusOr<absl::Span<const float>> Step(absl::Span<const int32_t> tokens,
                                               ParameterLender* lender);
  // Begins another sequence.
  void Reset() { length_ = 0; }

  int64_t length() const { return length_; }  // positions so far
  int64_t capacity() const { return capacity_; }

 private:
  Generator(const Model* model, Device* device, Ops* ops, DType dtype, int64_t capacity);
  // One pass over the model; `last`: with the logits of the last token.
  absl::Status Pass(absl::Span<const int32_t> tokens, bool last, ParameterLender* lender);

  const Model* model_;
  Device* const device_;
  const ModelConfig config_;
  const DType dtype_;
  const int64_t capacity_;
  const int64_t most_rows_;  // of a pass
  UnitContext context_;
  int64_t length_ = 0;
  std::vector<KvCache> caches_;  // by block
  Buffer cache_, scratch_, input_, output_, tokens_, logits_;
  Buffer read_logits_;  // the host's
};

}  // namespace zeroshard
