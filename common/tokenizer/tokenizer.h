// Text to token ids and back: bytes, or the byte-level BPE of a Hugging Face tokenizer.json (GPT-2,
// Llama 3, SmolLM2, Qwen2), with the same ids as Hugging Face's tokenizers without special tokens
// added. Immutable after loading; thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace zeroshard {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // `name`: bytes, the path of a tokenizer.json, or a folder that holds one (then
  // tokenizer_config.json and config.json beside it say which token ends a text). INVALID_ARGUMENT
  // names the file, the field, what was seen and what is supported; nothing is ignored that would
  // change an id.
  static absl::StatusOr<std::shared_ptr<const Tokenizer>> Load(const std::string& name);

  // Appends the ids of `text` to `ids`. Any bytes are text: what is not UTF-8 is treated as
  // documented in the folder's README.
  virtual void Encode(absl::string_view text, std::vector<int32_t>* ids) const = 0;
  // The bytes of the ids; special tokens by their text unless `skip_special`. OUT_OF_RANGE names an
  // id that there is not.
  virtual absl::StatusOr<std::string> Decode(absl::Span<const int32_t> ids,
                                             bool skip_special) const = 0;
  // One more than the largest id.
  virtual int64_t vocab_size() const = 0;
  // The token that ends a text, if there is one.
  virtual std::optional<int32_t> end_of_text() const = 0;
  // The id of a token by its text ("<|endoftext|>").
  virtual std::optional<int32_t> Find(absl::string_view token) const = 0;
  // A position near `from`, not before it, where `text` may be cut so that encoding the two parts
  // gives the ids of the whole; text.size() if there is none before `limit`.
  virtual size_t SafeCut(absl::string_view text, size_t from, size_t limit) const = 0;
};

}  // namespace zeroshard
