#include "common/tokenizer/bpe_tokenizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <utility>

#include "common/status_macros.h"
#include "common/tokenizer/normalizer.h"
#include "common/tokenizer/utf8.h"

namespace zeroshard {
namespace {

bool IsLetter(uint32_t code_point) {
  if (code_point < 0x80) {
    return (code_point >= 'a' && code_point <= 'z') || (code_point >= 'A' && code_point <= 'Z');
  }
  switch (utf8proc_category(static_cast<int32_t>(code_point))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return code_point < 0x10000;  // of later planes some are younger than the patterns' Unicode
    default:
      return false;
  }
}

// What a text may be cut before, if a letter is before it. The full width comma and the ideographic
// comma and full stop are what long lines of Chinese and Japanese have.
bool StartsPart(uint32_t code_point) {
  return code_point == ' ' || code_point == '\n' || code_point == 0xFF0C || code_point == 0x3001 ||
         code_point == 0x3002;
}

// Whether a token could be found across a cut, or would be, or take white space, on one side only.
bool ForbidsCuts(const AddedToken& token) {
  uint32_t last = 0;
  for (size_t at = 0; at < token.content.size();) {
    const CodePoint point = CodePointAt(token.content, at);
    if (StartsPart(point.value)) return true;
    last = point.value;
    at += point.bytes;
  }
  return token.rstrip && IsLetter(last);
}

}  // namespace

struct BpeTokenizer::Workspace {
  std::string utf8;
  std::string normal;
  PreTokenizer::Scratch pre_tokenizer;
  BytePairs::Scratch pairs;
};

// A workspace for one call.
class BpeTokenizer::Lease {
 public:
  explicit Lease(const BpeTokenizer* owner) : owner_(owner) {
    {
      const std::lock_guard<std::mutex> lock(owner_->mutex_);
      if (!owner_->idle_.empty()) {
        workspace_ = std::move(owner_->idle_.back());
        owner_->idle_.pop_back();
      }
    }
    if (workspace_ == nullptr) workspace_ = std::make_unique<Workspace>();
  }
  ~Lease() {
    constexpr size_t kKept = 16 << 20;  // a long text's copies are not worth keeping
    for (std::string* text :
         {&workspace_->utf8, &workspace_->normal, &workspace_->pre_tokenizer.spaced}) {
      if (text->capacity() > kKept) std::string().swap(*text);
    }
    const std::lock_guard<std::mutex> lock(owner_->mutex_);
    owner_->idle_.push_back(std::move(workspace_));
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  Workspace* operator->() const { return workspace_.get(); }

 private:
  const BpeTokenizer* const owner_;
  std::unique_ptr<Workspace> workspace_;
};

BpeTokenizer::BpeTokenizer(TokenizerParts parts, std::optional<int32_t> end_of_text)
    : nfc_(parts.nfc),
      pre_tokenizer_(std::move(parts.steps)),
      pairs_(std::move(parts.pairs)),
      table_(std::move(parts.table)),
      end_of_text_(end_of_text) {
  for (AddedToken& token : parts.added_tokens) {
    std::string normal;
    if (token.normalized && nfc_) {
      token.content = std::string(NormalizeNfc(token.content, &normal));
    }
    may_cut_ = may_cut_ && !ForbidsCuts(token);
    (token.normalized ? after_ : before_).Add(std::move(token));
  }
}

BpeTokenizer::~BpeTokenizer() = default;

void BpeTokenizer::Encode(absl::string_view text, std::vector<int32_t>* ids) const {
  if (text.empty()) return;
  const Lease workspace(this);
  const auto id = [&](int32_t found) { ids->push_back(found); };
  const auto word = [&](absl::string_view found) { pairs_.Encode(found, &workspace->pairs, ids); };
  const auto plain = [&](absl::string_view part) {
    pre_tokenizer_.ForEachWord(part, &workspace->pre_tokenizer, word);
  };
  const auto raw = [&](absl::string_view part) {
    if (nfc_) part = NormalizeNfc(part, &workspace->normal);
    after_.ForEach(part, plain, id);
  };
  before_.ForEach(AsUtf8(text, &workspace->utf8), raw, id);
}

absl::StatusOr<std::string> BpeTokenizer::Decode(absl::Span<const int32_t> ids,
                                                 bool skip_special) const {
  std::string text;
  ZS_RETURN_IF_ERROR(table_.Append(ids, skip_special, &text));
  return text;
}

size_t BpeTokenizer::SafeCut(absl::string_view text, size_t from, size_t limit) const {
  if (!may_cut_) return text.size();
  const bool only_space = pre_tokenizer_.adds_space();
  const size_t end = std::min(limit, text.size());
  for (size_t at = std::max<size_t>(from, 1); at < end; ++at) {
    const auto lead = static_cast<uint8_t>(text[at]);
    if (lead != ' ' && (only_space || (lead != '\n' && lead != 0xEF && lead != 0xE3))) continue;
    // Invalid text is replaced by what is no letter, so that both sides are looked at as they are.
    const size_t length = lead < 0x80 ? 1 : 3;
    if (text.size() - at < length || ValidUtf8Prefix(text.substr(at, length)) != length) continue;
    if (!StartsPart(CodePointAt(text, at).value)) continue;
    const size_t window = at - std::min<size_t>(at, 4);
    const size_t before = window + CodePointBefore(text.substr(window, at - window), at - window);
    const absl::string_view letter = text.substr(before, at - before);
    if (ValidUtf8Prefix(letter) != letter.size()) continue;
    const CodePoint point = CodePointAt(letter, 0);
    if (point.bytes == letter.size() && IsLetter(point.value) &&
        IsNormalizationBoundary(point.value)) {
      return at;
    }
  }
  return text.size();
}

}  // namespace zeroshard
