// The dataset of a job: a run of tokens cut into samples.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "worker/data/dataset.h"
#include "worker/data/open_files.h"
#include "worker/data/token_run.h"

namespace zeroshard {
namespace {

class RunDataset : public TokenDataset {
 public:
  RunDataset(TokenRun run, int64_t sequence, bool masks_documents)
      : run_(std::move(run)), sequence_(sequence), masks_documents_(masks_documents) {}

  int64_t token_count() const override { return run_.size(); }
  int64_t sample_count() const override { return (run_.size() - 1) / sequence_; }
  bool masks_documents() const override { return masks_documents_; }

  void Sample(int64_t index, absl::Span<int32_t> tokens,
              absl::Span<int32_t> targets) const override {
    const int64_t begin = index * sequence_;
    absl::Status read = run_.Read(begin, tokens);
    if (read.ok()) read = run_.Read(begin + 1, targets);
    if (read.ok()) {
      run_.MaskSilent(begin + 1, targets);
      if (masks_documents_) read = MaskFirstTokens(begin + 1, targets);
    }
    if (read.ok()) return;
    Changed(std::move(read));
    std::fill(tokens.begin(), tokens.end(), 0);
    std::fill(targets.begin(), targets.end(), -1);
  }

  void DocumentStarts(int64_t index, absl::Span<int32_t> starts) const override {
    std::fill(starts.begin(), starts.end(), 0);
    if (!masks_documents_) return;
    const int64_t begin = index * sequence_;
    absl::StatusOr<std::vector<int64_t>> begins =
        run_.DocumentBegins(begin, begin + static_cast<int64_t>(starts.size()));
    if (!begins.ok()) return Changed(begins.status());
    for (const int64_t at : *begins) {
      std::fill(starts.begin() + (at - begin), starts.end(), static_cast<int32_t>(at - begin));
    }
  }

  absl::Status status() const override {
    if (!changed_.load(std::memory_order_acquire)) return absl::OkStatus();
    std::lock_guard<std::mutex> lock(mutex_);
    return status_;
  }

 private:
  absl::Status MaskFirstTokens(int64_t position, absl::Span<int32_t> targets) const {
    ZS_ASSIGN_OR_RETURN(
        const std::vector<int64_t> begins,
        run_.DocumentBegins(position, position + static_cast<int64_t>(targets.size())));
    for (const int64_t at : begins) targets[at - position] = -1;
    return absl::OkStatus();
  }

  void Changed(absl::Status status) const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!status_.ok()) return;
    status_ = std::move(status);
    changed_.store(true, std::memory_order_release);
  }

  const TokenRun run_;
  const int64_t sequence_;
  const bool masks_documents_;
  mutable std::atomic<bool> changed_{false};
  mutable std::mutex mutex_;
  mutable absl::Status status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TokenDataset>> TokenDataset::Open(const v1::DataSpec& spec,
                                                                 int64_t sequence,
                                                                 int64_t vocab_size,
                                                                 const DatasetOptions& options) {
  if (sequence < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("model.sequence_length is ", sequence, "; wanted at least 1"));
  }
  if (spec.train().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.key, " is empty; name at least one file or folder"));
  }
  ZS_ASSIGN_OR_RETURN(TokenRun run, OpenFiles(spec, vocab_size, options));
  const std::string names = absl::StrCat(options.key, " (", absl::StrJoin(spec.train(), ", "), ")");
  if (run.size() < sequence + 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        names, " needs at least ", sequence + 1, " tokens (model.sequence_length + 1), has ",
        run.size(), "; name more data or lower model.sequence_length"));
  }
  if (run.silent() == run.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(names, " holds prompts alone, whose tokens carry no loss"));
  }
  return std::make_unique<RunDataset>(std::move(run), sequence, spec.packing().mask_documents());
}

}  // namespace zeroshard
