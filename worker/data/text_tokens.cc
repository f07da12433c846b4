#include "worker/data/text_tokens.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

constexpr size_t kPartBytes = 64 << 10;
constexpr int64_t kRoundBytes = 512 << 10;  // a thread, so that starting it does not matter
constexpr size_t kPieceBytes = 16 << 20;

}  // namespace

TextTokens::TextTokens(const Options& options, TokenRun* run)
    : options_(options),
      run_(run),
      width_(
          std::max<int64_t>(options.tokenizer->vocab_size() - 1, options.separator.value_or(0)) <=
                  std::numeric_limits<uint16_t>::max()
              ? 2
              : 4) {}

absl::Status TextTokens::CheckRoom(int64_t bytes) const {
  if (bytes <= options_.limit - text_bytes_) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat(
      "more than ", options_.limit,
      " bytes of text to turn into tokens before training, on every rank; run `zeroshard tokenize` "
      "once and train on its output with data.tokenizer: tokens"));
}

absl::Status TextTokens::Add(Document&& document) {
  const auto bytes = static_cast<int64_t>(document.prompt.size() + document.text.size());
  ZS_RETURN_IF_ERROR(CheckRoom(bytes));
  text_bytes_ += bytes;
  if (document.prompt.empty() && document.text.empty()) return absl::OkStatus();
  documents_.push_back(std::move(document));
  const Document& kept = documents_.back();
  parts_.push_back({.text = "", .begins = true});
  ZS_RETURN_IF_ERROR(AddParts(kept.prompt, true));
  ZS_RETURN_IF_ERROR(AddParts(kept.text, false));
  parts_.push_back({.text = "", .ends = true});
  // Short documents are as many parts as long ones.
  if (part_bytes_ >= kRoundBytes * options_.threads || parts_.size() >= 100000) {
    ZS_RETURN_IF_ERROR(EncodeParts());
  }
  if (parts_.empty()) documents_.clear();
  return absl::OkStatus();
}

absl::Status TextTokens::AddParts(absl::string_view text, bool silent) {
  while (!text.empty()) {
    size_t cut = text.size();
    if (cut > kPartBytes) {
      cut = std::min(options_.tokenizer->SafeCut(text, kPartBytes, text.size()), text.size());
    }
    if (cut == 0) return absl::InternalError("a text was cut before its first byte");
    parts_.push_back({.text = text.substr(0, cut), .silent = silent});
    text.remove_prefix(cut);
    part_bytes_ += static_cast<int64_t>(cut);
    if (part_bytes_ < kRoundBytes * options_.threads) continue;
    ZS_RETURN_IF_ERROR(EncodeParts());
    documents_.erase(documents_.begin(), documents_.end() - 1);  // `text` is of the last
  }
  return absl::OkStatus();
}

absl::Status TextTokens::EncodeParts() {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&] {
    try {
      EncodeSome(&next);
    } catch (const std::exception&) {
      failed = true;
    }
  };
  std::vector<std::thread> helpers;
  const int64_t helpful = std::min<int64_t>(options_.threads, part_bytes_ / (kPartBytes / 2));
  try {
    for (int64_t i = 1; i < helpful; ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // As many as the system allows.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (failed)
    return absl::ResourceExhaustedError("out of memory while text was turned into tokens");
  for (const Part& part : parts_) ZS_RETURN_IF_ERROR(Take(part));
  parts_.clear();
  part_bytes_ = 0;
  return absl::OkStatus();
}

void TextTokens::EncodeSome(std::atomic<size_t>* next) {
  for (size_t i = (*next)++; i < parts_.size(); i = (*next)++) {
    if (!parts_[i].text.empty()) options_.tokenizer->Encode(parts_[i].text, &parts_[i].ids);
  }
}

absl::Status TextTokens::Take(const Part& part) {
  if (part.begins) run_->BeginDocument(count_);
  if (part.silent) run_->Silence(count_, static_cast<int64_t>(part.ids.size()));
  for (const int32_t id : part.ids) {
    if (id < 0 || id >= options_.tokenizer->vocab_size()) {
      return absl::InternalError(absl::StrCat("the tokenizer gave the id ", id, ", not below ",
                                              options_.tokenizer->vocab_size()));
    }
    PushToken(id);
  }
  if (part.ends && options_.separator.has_value()) PushToken(*options_.separator);
  if (ids_.size() >= kPieceBytes) Flush();
  return absl::OkStatus();
}

void TextTokens::PushToken(int32_t id) {
  // Little-endian, as in files.
  ids_.append(reinterpret_cast<const char*>(&id), width_);
  ++count_;
}

void TextTokens::Flush() {
  const TokenLayout layout{0, width_ == 2 ? IdType::kUint16 : IdType::kUint32, count_};
  ids_.shrink_to_fit();
  run_->Append(
      {.path = "tokens in memory", .bytes = FileBytes::Of(std::move(ids_)), .layout = layout});
  ids_.clear();
  count_ = 0;
}

absl::Status TextTokens::Finish() {
  ZS_RETURN_IF_ERROR(EncodeParts());
  documents_.clear();
  Flush();
  return absl::OkStatus();
}

}  // namespace zeroshard
