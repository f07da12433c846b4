#include "worker/data/token_run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace zeroshard {

void TokenRun::Append(Piece piece) {
  if (piece.layout.count == 0) return;
  const int64_t count = piece.layout.count;
  pieces_.push_back({std::move(piece), size_});
  size_ += count;
}

void TokenRun::BeginDocument(int64_t ahead) { documents_.push_back(size_ + ahead); }

void TokenRun::Silence(int64_t ahead, int64_t count) {
  if (count == 0) return;
  const int64_t begin = size_ + ahead;
  silent_count_ += count;
  if (!silent_.empty() && silent_.back().end == begin) {
    silent_.back().end += count;
  } else {
    silent_.push_back({begin, begin + count});
  }
}

std::vector<TokenRun::Placed>::const_iterator TokenRun::At(int64_t position) const {
  return std::upper_bound(pieces_.begin(), pieces_.end(), position,
                          [](int64_t at, const Placed& placed) { return at < placed.begin; }) -
         1;  // the first one begins at 0
}

absl::Status TokenRun::Read(int64_t position, absl::Span<int32_t> tokens) const {
  size_t done = 0;
  for (auto placed = At(position); done < tokens.size(); ++placed) {
    const Piece& piece = placed->piece;
    const int64_t skip = position + static_cast<int64_t>(done) - placed->begin;
    const int64_t count = std::min<int64_t>(tokens.size() - done, piece.layout.count - skip);
    int64_t bad = 0;
    const int64_t good = CopyTokenIds(piece.bytes.bytes(), piece.layout, skip, vocab_size_,
                                      tokens.subspan(done, count), &bad);
    if (good < count) {
      return absl::DataLossError(
          absl::StrCat("token file ", piece.path, " changed while it was used: token ", skip + good,
                       " is now ", bad, ", not from 0 on and below model.vocab_size ", vocab_size_,
                       "; submit the job again when the file is complete"));
    }
    done += count;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> TokenRun::DocumentBegins(int64_t begin, int64_t end) const {
  std::vector<int64_t> begins(std::lower_bound(documents_.begin(), documents_.end(), begin),
                              std::lower_bound(documents_.begin(), documents_.end(), end));
  if (begin < end) {
    // A separator that ends a piece is followed by a file of its own.
    for (auto placed = At(begin); placed != pieces_.end() && placed->begin < end; ++placed) {
      const int64_t from = std::max(begin, placed->begin);
      const int64_t to = std::min(end, placed->begin + placed->piece.layout.count);
      if (placed->piece.separator.has_value()) {
        ZS_RETURN_IF_ERROR(AddSeparated(*placed, from, to, &begins));
      }
      if (placed->piece.index != nullptr) {
        ZS_RETURN_IF_ERROR(AddIndexed(*placed, from, to, &begins));
      }
    }
  }
  std::sort(begins.begin(), begins.end());
  begins.erase(std::unique(begins.begin(), begins.end()), begins.end());
  return begins;
}

absl::Status TokenRun::AddSeparated(const Placed& placed, int64_t begin, int64_t end,
                                    std::vector<int64_t>* begins) const {
  const int64_t first = std::max(begin - 1, placed.begin);  // the token before may be a separator
  std::vector<int32_t> tokens(std::max<int64_t>(end - 1 - first, 0));
  ZS_RETURN_IF_ERROR(Read(first, absl::MakeSpan(tokens)));
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == *placed.piece.separator) begins->push_back(first + i + 1);
  }
  return absl::OkStatus();
}

absl::Status TokenRun::AddIndexed(const Placed& placed, int64_t begin, int64_t end,
                                  std::vector<int64_t>* begins) const {
  const MegatronIndex& index = *placed.piece.index;
  const auto changed = [&index] {
    return absl::DataLossError(absl::StrCat("Megatron index ", index.path(),
                                            " changed while it was used: a document begins outside "
                                            "its file; submit the job again when it is complete"));
  };
  int64_t low = 0, high = index.documents();  // the first that does not begin before `begin`
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const std::optional<int64_t> at = index.DocumentBegin(middle);
    if (!at.has_value()) return changed();
    if (placed.begin + *at < begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  for (; low < index.documents(); ++low) {
    const std::optional<int64_t> at = index.DocumentBegin(low);
    if (!at.has_value()) return changed();
    if (placed.begin + *at >= end) break;
    if (placed.begin + *at >= begin) begins->push_back(placed.begin + *at);
  }
  return absl::OkStatus();
}

void TokenRun::MaskSilent(int64_t position, absl::Span<int32_t> targets) const {
  const int64_t end = position + static_cast<int64_t>(targets.size());
  auto range = std::upper_bound(silent_.begin(), silent_.end(), position,
                                [](int64_t at, const Range& r) { return at < r.end; });
  for (; range != silent_.end() && range->begin < end; ++range) {
    const int64_t from = std::max(range->begin, position) - position;
    const int64_t to = std::min(range->end, end) - position;
    std::fill(targets.begin() + from, targets.begin() + to, -1);
  }
}

}  // namespace zeroshard
