#include "worker/data/dataset.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/data/file_bytes.h"
#include "worker/data/input_files.h"
#include "worker/data/token_file.h"

namespace zeroshard {
namespace {

// One file's part of the run of tokens.
struct Span {
  std::string path;
  FileBytes file;
  TokenLayout layout;
  int64_t begin = 0;  // place of its first token in the run
};

template <typename T>
void Widen(const uint8_t* from, int64_t count, int32_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));
    to[i] = static_cast<int32_t>(value);
  }
}

class FileDataset : public TokenDataset {
 public:
  FileDataset(std::vector<Span> spans, int64_t tokens, int64_t sequence, int64_t vocab_size)
      : spans_(std::move(spans)), tokens_(tokens), sequence_(sequence), vocab_size_(vocab_size) {}

  int64_t token_count() const override { return tokens_; }
  int64_t sample_count() const override { return (tokens_ - 1) / sequence_; }

  void Sample(int64_t index, absl::Span<int32_t> tokens,
              absl::Span<int32_t> targets) const override {
    const int64_t begin = index * sequence_;
    bool good = Read(begin, tokens) && Read(begin + 1, targets);
    if (good) return;
    std::fill(tokens.begin(), tokens.end(), 0);
    std::fill(targets.begin(), targets.end(), -1);
  }

  absl::Status status() const override {
    if (!changed_.load(std::memory_order_acquire)) return absl::OkStatus();
    std::lock_guard<std::mutex> lock(mutex_);
    return status_;
  }

 private:
  // Fills `out` with the tokens from `position` on; false if one is out of range, which can only be
  // if the file was written to after it was checked.
  bool Read(int64_t position, absl::Span<int32_t> out) const {
    auto span = std::upper_bound(spans_.begin(), spans_.end(), position,
                                 [](int64_t at, const Span& s) { return at < s.begin; });
    --span;  // the first span begins at 0
    size_t done = 0;
    for (; done < out.size(); ++span) {
      const int64_t skip = position + static_cast<int64_t>(done) - span->begin;
      const int64_t count =
          std::min<int64_t>(out.size() - done, std::max<int64_t>(span->layout.count - skip, 0));
      const uint8_t* from =
          span->file.bytes().data() + span->layout.offset + skip * span->layout.width;
      int32_t* to = out.data() + done;
      switch (span->layout.width) {
        case 1:
          Widen<uint8_t>(from, count, to);
          break;
        case 2:
          Widen<uint16_t>(from, count, to);
          break;
        default:
          Widen<uint32_t>(from, count, to);
      }
      for (int64_t i = 0; i < count; ++i) {
        if (to[i] >= 0 && to[i] < vocab_size_) continue;
        Changed(*span, skip + i, static_cast<uint32_t>(to[i]));
        return false;
      }
      done += count;
    }
    return true;
  }

  void Changed(const Span& span, int64_t offset, uint32_t id) const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!status_.ok()) return;
    status_ = absl::DataLossError(
        absl::StrCat("token file ", span.path, " changed while it was used: token ", offset,
                     " is now ", id, ", not below model.vocab_size ", vocab_size_,
                     "; submit the job again when the file is complete"));
    changed_.store(true, std::memory_order_release);
  }

  const std::vector<Span> spans_;
  const int64_t tokens_;
  const int64_t sequence_;
  const int64_t vocab_size_;
  mutable std::atomic<bool> changed_{false};
  mutable std::mutex mutex_;
  mutable absl::Status status_;
};

constexpr uint8_t kBom[] = {0xEF, 0xBB, 0xBF};

TokenLayout ByteLayout(absl::Span<const uint8_t> bytes) {
  const bool bom = bytes.size() >= sizeof(kBom) && std::equal(kBom, kBom + 3, bytes.begin());
  const int64_t offset = bom ? sizeof(kBom) : 0;
  return {offset, 1, static_cast<int64_t>(bytes.size()) - offset};
}

}  // namespace

void TokenDataset::DocumentStarts(int64_t index, absl::Span<int32_t> starts) const {
  std::fill(starts.begin(), starts.end(), 0);
}

absl::StatusOr<std::unique_ptr<TokenDataset>> TokenDataset::Open(const v1::DataSpec& spec,
                                                                 int64_t sequence,
                                                                 int64_t vocab_size) {
  const bool text = spec.tokenizer() == "bytes";
  if (!text && spec.tokenizer() != "tokens") {
    return absl::InvalidArgumentError(
        absl::StrCat("data.tokenizer is \"", spec.tokenizer(),
                     "\"; wanted bytes (any file, one token a byte) or tokens (files of ids)"));
  }
  if (sequence < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("model.sequence_length is ", sequence, "; wanted at least 1"));
  }
  if (spec.train().empty()) {
    return absl::InvalidArgumentError("data.train is empty; name at least one file or folder");
  }
  if (text && vocab_size < 256) {
    return absl::InvalidArgumentError(absl::StrCat("model.vocab_size is ", vocab_size,
                                                   "; data.tokenizer bytes needs at least 256"));
  }
  absl::StatusOr<std::vector<InputFile>> files =
      ListInputFiles({spec.train().begin(), spec.train().end()}, text ? "" : ".bin");
  if (!files.ok()) return files.status();

  std::vector<Span> spans;
  int64_t total = 0;
  for (InputFile& input : *files) {
    absl::StatusOr<FileBytes> file = FileBytes::Open(input.path);
    if (!file.ok()) return file.status();
    TokenLayout layout;
    if (text) {
      if (file->bytes().empty() && input.named) {
        return absl::InvalidArgumentError(
            absl::StrCat("data.train file ", input.path, " is empty (0 bytes)"));
      }
      layout = ByteLayout(file->bytes());
    } else {
      absl::StatusOr<TokenLayout> recognized = RecognizeTokenFile(input.path, file->bytes());
      if (!recognized.ok()) return recognized.status();
      layout = *recognized;
      absl::Status checked = CheckTokenIds(input.path, file->bytes(), layout, vocab_size);
      if (!checked.ok()) return checked;
      file->DropPages();
    }
    if (layout.count == 0) continue;
    const int64_t count = layout.count;
    spans.push_back({std::move(input.path), *std::move(file), layout, total});
    total += count;
  }
  if (total < sequence + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("data.train (", absl::StrJoin(spec.train(), ", "), ") needs at least ",
                     sequence + 1, " tokens (model.sequence_length + 1), has ", total,
                     "; name more data or lower model.sequence_length"));
  }
  return std::make_unique<FileDataset>(std::move(spans), total, sequence, vocab_size);
}

}  // namespace zeroshard
