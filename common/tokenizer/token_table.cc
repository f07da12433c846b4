#include "common/tokenizer/token_table.h"

#include "absl/strings/str_cat.h"

namespace zeroshard {

void TokenTable::Set(int32_t id, absl::string_view text, Kind kind) {
  const auto index = static_cast<size_t>(id);
  if (entries_.size() <= index) entries_.resize(index + 1);
  entries_[index] = {bytes_.size(), static_cast<uint32_t>(text.size()), kind};
  bytes_.append(text.data(), text.size());
}

absl::string_view TokenTable::text(int32_t id) const {
  if (kind(id) == Kind::kNone) return {};
  const Entry& entry = entries_[static_cast<size_t>(id)];
  return absl::string_view(bytes_).substr(entry.begin, entry.length);
}

std::optional<int32_t> TokenTable::Find(absl::string_view wanted) const {
  std::optional<int32_t> found;
  for (int32_t id = 0; id < size(); ++id) {
    if (kind(id) == Kind::kNone || text(id) != wanted) continue;
    if (kind(id) != Kind::kVocabulary) return id;
    if (!found.has_value()) found = id;
  }
  return found;
}

absl::Status TokenTable::Append(absl::Span<const int32_t> ids, bool skip_special,
                                std::string* text_out) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    const Kind kind_of = kind(ids[i]);
    if (kind_of == Kind::kNone) {
      return absl::OutOfRangeError(
          absl::StrCat("token ", i, " is ", ids[i], ", which is none of the tokenizer's ids (0 to ",
                       size() - 1, "); was the text made with another tokenizer?"));
    }
    if (kind_of == Kind::kSpecial && skip_special) continue;
    const absl::string_view bytes = text(ids[i]);
    text_out->append(bytes.data(), bytes.size());
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
