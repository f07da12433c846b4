// Documents of text turned into tokens in memory, on several threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/text/documents.h"
#include "common/tokenizer/tokenizer.h"
#include "worker/data/token_run.h"

namespace zeroshard {

// Appends documents to a run: the prompt's tokens (which carry no loss), the text's, and the
// separator where there is one. The tokens do not depend on the number of threads. Used by one
// thread.
class TextTokens {
 public:
  struct Options {
    const Tokenizer* tokenizer = nullptr;
    std::optional<int32_t> separator;
    int threads = 1;
    int64_t limit = int64_t{2} << 30;  // bytes of text that are turned into tokens here
  };

  TextTokens(const Options& options, TokenRun* run);
  // Whether `bytes` more of text would still be within the limit; OUT_OF_RANGE if not.
  absl::Status CheckRoom(int64_t bytes) const;
  // An empty document adds nothing. OUT_OF_RANGE: more text than the limit. RESOURCE_EXHAUSTED: no
  // memory. INTERNAL: the tokenizer gave an id that is not below its vocab_size().
  absl::Status Add(Document&& document);
  // What was added is in the run only after this.
  absl::Status Finish();

  // Documents whose text is still kept: those of one round and the last.
  size_t documents_kept() const { return documents_.size(); }

 private:
  // A part of a document; the parts around it give the same ids as one text would.
  struct Part {
    absl::string_view text;
    bool silent = false;
    bool begins = false;
    bool ends = false;
    std::vector<int32_t> ids = {};
  };

  absl::Status AddParts(absl::string_view text, bool silent);
  absl::Status EncodeParts();
  void EncodeSome(std::atomic<size_t>* next);
  absl::Status Take(const Part& part);
  void PushToken(int32_t id);
  void Flush();

  const Options options_;
  TokenRun* const run_;
  const int width_;
  int64_t text_bytes_ = 0;
  int64_t part_bytes_ = 0;  // in parts_
  std::deque<Document> documents_;
  std::vector<Part> parts_;
  std::string ids_;  // not yet in the run
  int64_t count_ = 0;
};

}  // namespace zeroshard
