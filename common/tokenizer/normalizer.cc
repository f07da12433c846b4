#include "common/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "common/tokenizer/utf8.h"

namespace zeroshard {
namespace {

struct Range {
  uint32_t first;
  uint32_t last;
};

// What Unicode 10 to 15 added of marks that are reordered, and of characters that compose. Hugging
// Face's tokenizers normalize by Unicode 9, where these were not assigned.
constexpr Range kYoung[] = {
    {0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},
    {0xC3C, 0xC3C},     {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},
    {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x10D24, 0x10D27},
    {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85},
    {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A},
    {0x11935, 0x11935}, {0x11938, 0x11938}, {0x1193D, 0x1193E}, {0x11943, 0x11943},
    {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99},
    {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42},
    {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE},
    {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF},
};

// All below are starters of their own normal form that nothing before them combines with.
constexpr uint32_t kFirstMark = 0x300;
constexpr uint8_t kFirstMarkLead = 0xCC;  // of its UTF-8

constexpr auto kDecompose = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE);

bool IsYoung(uint32_t code_point) {
  const Range* range =
      std::lower_bound(std::begin(kYoung), std::end(kYoung), code_point,
                       [](const Range& range, uint32_t value) { return range.last < value; });
  return range != std::end(kYoung) && range->first <= code_point;
}

int CombiningClass(int32_t code_point) {
  return utf8proc_get_property(code_point)->combining_class;
}

// Form C of a piece between two boundaries.
class PieceNormalizer {
 public:
  void Append(absl::string_view piece, std::string* to) {
    points_.clear();
    for (size_t at = 0; at < piece.size();) {
      const CodePoint point = CodePointAt(piece, at);
      at += point.bytes;
      int32_t parts[8];  // no canonical decomposition is longer than four
      int last_class = 0;
      const auto count = utf8proc_decompose_char(static_cast<int32_t>(point.value), parts,
                                                 std::size(parts), kDecompose, &last_class);
      if (count < 0 || count > static_cast<utf8proc_ssize_t>(std::size(parts))) {
        points_.push_back(static_cast<int32_t>(point.value));
      } else {
        points_.insert(points_.end(), parts, parts + count);
      }
    }
    // utf8proc's own ordering takes quadratic time.
    for (size_t begin = 0; begin < points_.size();) {
      size_t end = begin;
      while (end < points_.size() && CombiningClass(points_[end]) != 0) ++end;
      std::stable_sort(points_.begin() + begin, points_.begin() + end,
                       [](int32_t a, int32_t b) { return CombiningClass(a) < CombiningClass(b); });
      begin = end + 1;
    }
    const auto count = utf8proc_normalize_utf32(
        points_.data(), static_cast<utf8proc_ssize_t>(points_.size()),
        static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    for (utf8proc_ssize_t i = 0; i < count; ++i) {
      AppendCodePoint(static_cast<uint32_t>(points_[i]), to);
    }
  }

 private:
  std::vector<int32_t> points_;
};

}  // namespace

bool IsNormalizationBoundary(uint32_t code_point) {
  if (code_point < kFirstMark || IsYoung(code_point)) return true;
  if (code_point >= 0x1100 && code_point <= 0x11FF) return false;  // conjoining Hangul
  const utf8proc_property_t* property = utf8proc_get_property(static_cast<int32_t>(code_point));
  if (property->combining_class != 0 || property->decomp_seqindex != UINT16_MAX) return false;
  // utf8proc tells in one field that a character composes, first or second; only marks are second.
  return property->comb_index == UINT16_MAX ||
         (property->category != UTF8PROC_CATEGORY_MN && property->category != UTF8PROC_CATEGORY_MC);
}

absl::string_view NormalizeNfc(absl::string_view text, std::string* storage) {
  PieceNormalizer normalizer;
  bool copied = false;
  size_t kept = 0;      // text before is in `storage`, once `copied`
  size_t boundary = 0;  // the newest place where the text may be cut
  size_t at = 0;
  while (at < text.size()) {
    if (static_cast<uint8_t>(text[at]) < kFirstMarkLead) {
      boundary = at;
      at += static_cast<uint8_t>(text[at]) < 0x80 ? 1 : 2;
      continue;
    }
    const CodePoint point = CodePointAt(text, at);
    if (IsNormalizationBoundary(point.value)) {
      // Nothing composes with a young character: the text may also be cut behind it.
      boundary = IsYoung(point.value) ? at + point.bytes : at;
      at += point.bytes;
      continue;
    }
    if (!copied) storage->clear();
    copied = true;
    size_t end = at + point.bytes;
    while (end < text.size()) {
      const CodePoint next = CodePointAt(text, end);
      if (IsNormalizationBoundary(next.value)) break;
      end += next.bytes;
    }
    storage->append(text.data() + kept, boundary - kept);
    normalizer.Append(text.substr(boundary, end - boundary), storage);
    kept = boundary = at = end;
  }
  if (!copied) return text;
  storage->append(text.data() + kept, text.size() - kept);
  return *storage;
}

}  // namespace zeroshard
