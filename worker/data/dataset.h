// Tokens to train on, or to measure the loss on. Immutable after opening; thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/tokenizer/tokenizer.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// What opening takes besides the specification.
struct DatasetOptions {
  // That turn text into tokens; 0: as many as the machine has cores.
  int threads = 0;
  // What messages call the list of files.
  std::string key = "data.train";
  // Instead of the one that spec.tokenizer() names, where that is a tokenizer.json or a folder.
  std::shared_ptr<const Tokenizer> tokenizer = nullptr;
};

// All training text as one run of tokens, cut into samples of T+1 tokens that start every T tokens
// (a sample's last target is the next one's first token); what is left over at the end is not used.
// Text read with a tokenizer.json, and JSON lines, are documents: each ends with its separator.
//
// A target is -1 (no loss) where that token belongs to a prompt; and with masks_documents(), where
// it is the first of its document, since nothing of that precedes it. A sample may be all -1.
class TokenDataset {
 public:
  // Reads and checks everything before training: INVALID_ARGUMENT or NOT_FOUND name file, offset,
  // value seen and value wanted (a token id >= vocab_size, an odd byte count, fewer than T+1
  // tokens, a tokenizer with more tokens than vocab_size, documents that are to be masked but whose
  // ends nothing tells). OUT_OF_RANGE: more text than is turned into tokens in memory (2 GiB).
  static absl::StatusOr<std::unique_ptr<TokenDataset>> Open(const v1::DataSpec& spec,
                                                            int64_t sequence, int64_t vocab_size,
                                                            const DatasetOptions& options = {});
  virtual ~TokenDataset() = default;
  virtual int64_t token_count() const = 0;
  virtual int64_t sample_count() const = 0;
  // tokens[T] and targets[T] of sample index in [0, sample_count).
  virtual void Sample(int64_t index, absl::Span<int32_t> tokens,
                      absl::Span<int32_t> targets) const = 0;
  // True where attention must not cross documents (data.packing.mask_documents).
  virtual bool masks_documents() const { return false; }
  // starts[T] of a sample: where in it the document of each token starts (0 where it started
  // before). Zeros unless masks_documents(), and for a sample that status() is about.
  virtual void DocumentStarts(int64_t index, absl::Span<int32_t> starts) const;
  // DATA_LOSS once a sample met a token id that was in range when the file was checked: the file
  // was written to meanwhile. Such a sample is handed out as tokens 0 with targets -1 (no loss),
  // and whoever trains must look here before it uses the step.
  virtual absl::Status status() const { return absl::OkStatus(); }
};

// The order of samples: sample `position` (0-based over the whole run) is element position % n of
// the permutation of epoch position / n. Each epoch holds each sample once; epochs differ; the
// order does not depend on the world size. Computed in O(1) memory (a keyed permutation),
// thread-safe.
class SampleOrder {
 public:
  SampleOrder(int64_t samples, uint64_t seed);
  int64_t At(int64_t position) const;

 private:
  int64_t samples_;
  uint64_t seed_;
  int bits_;
};

}  // namespace zeroshard
