// One run of tokens out of many pieces: files as they lie, and tokens in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/data/file_bytes.h"
#include "worker/data/megatron.h"
#include "worker/data/token_file.h"

namespace zeroshard {

// Filled by one thread, then read by any number.
class TokenRun {
 public:
  // One piece. Where its documents begin, besides the places given to BeginDocument: behind each
  // `separator`, and where `index` says.
  struct Piece {
    std::string path;  // for messages
    FileBytes bytes;
    TokenLayout layout;
    std::optional<int32_t> separator = std::nullopt;
    std::shared_ptr<const MegatronIndex> index = nullptr;
  };

  explicit TokenRun(int64_t vocab_size) : vocab_size_(vocab_size) {}

  // A piece without tokens is dropped.
  void Append(Piece piece);
  // A document begins with the token that `ahead` more tokens will be appended before.
  void BeginDocument(int64_t ahead = 0);
  // `count` tokens that carry no loss, from the one that `ahead` more will be appended before.
  void Silence(int64_t ahead, int64_t count);

  int64_t size() const { return size_; }
  int64_t silent() const { return silent_count_; }

  // The tokens from `position` on, all of which must be in the run. DATA_LOSS: a file was written
  // to since it was checked, and now holds an id that is none; names file, place and id.
  absl::Status Read(int64_t position, absl::Span<int32_t> tokens) const;
  // The places in [begin, end) at which a document begins, rising, each once. DATA_LOSS as above.
  absl::StatusOr<std::vector<int64_t>> DocumentBegins(int64_t begin, int64_t end) const;
  // Sets targets[i] to -1 where the token at position + i carries no loss.
  void MaskSilent(int64_t position, absl::Span<int32_t> targets) const;

 private:
  struct Placed {
    Piece piece;
    int64_t begin;  // place of its first token in the run
  };
  struct Range {
    int64_t begin, end;
  };

  std::vector<Placed>::const_iterator At(int64_t position) const;
  absl::Status AddSeparated(const Placed& placed, int64_t begin, int64_t end,
                            std::vector<int64_t>* begins) const;
  absl::Status AddIndexed(const Placed& placed, int64_t begin, int64_t end,
                          std::vector<int64_t>* begins) const;

  int64_t vocab_size_;
  int64_t size_ = 0;
  int64_t silent_count_ = 0;
  std::vector<Placed> pieces_;
  std::vector<int64_t> documents_;
  std::vector<Range> silent_;
};

}  // namespace zeroshard
