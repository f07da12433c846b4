// Text to the words that byte pairs are merged in: the "pre_tokenizer" of a tokenizer.json.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;

namespace zeroshard {

// One of the regular expressions that published models cut text with. Immutable; thread-safe.
class WordPattern {
 public:
  static constexpr absl::string_view kGpt2 =
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
  static constexpr absl::string_view kLlama3 =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
      R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
  static constexpr absl::string_view kQwen2 =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
      R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";

  // INVALID_ARGUMENT: none of the above, which alone are known to mean the same in PCRE2 as in the
  // library that Hugging Face's tokenizers use, to match every character, and to take linear time.
  static absl::StatusOr<std::shared_ptr<const WordPattern>> Make(absl::string_view pattern);
  ~WordPattern();
  WordPattern(const WordPattern&) = delete;
  WordPattern& operator=(const WordPattern&) = delete;

  // The memory of one match at a time.
  class Matcher {
   public:
    Matcher();
    ~Matcher();
    Matcher(const Matcher&) = delete;
    Matcher& operator=(const Matcher&) = delete;

   private:
    friend class WordPattern;
    pcre2_real_match_data_8* data_;
    pcre2_real_match_context_8* context_;
  };

  // Where the word that starts at `at` < text.size() ends. `text` is UTF-8.
  size_t WordEnd(absl::string_view text, size_t at, Matcher* matcher) const;

 private:
  explicit WordPattern(pcre2_real_code_8* code) : code_(code) {}
  pcre2_real_code_8* const code_;
};

// A sequence of steps, each of which cuts the pieces that the one before made.
class PreTokenizer {
 public:
  struct Step {
    enum class Kind {
      kPattern,           // every match of `pattern` is a piece
      kDigits,            // a number character is a piece of its own, what is between is one
      kContiguousDigits,  // so is a run of number characters
      kSpace,             // a piece that does not start with a space gets one
    };
    Kind kind;
    std::shared_ptr<const WordPattern> pattern;  // of kPattern
  };

  explicit PreTokenizer(std::vector<Step> steps) : steps_(std::move(steps)) {}

  // What a call needs; one call at a time, kept from call to call.
  struct Scratch {
    WordPattern::Matcher matcher;
    std::string spaced;
  };

  // Calls `word` for the words of `text`, UTF-8 and not empty, in order.
  void ForEachWord(absl::string_view text, Scratch* scratch,
                   absl::FunctionRef<void(absl::string_view)> word) const;

  // Whether pieces get a space in front.
  bool adds_space() const;

 private:
  void Run(size_t step, absl::string_view text, Scratch* scratch,
           absl::FunctionRef<void(absl::string_view)> word) const;

  const std::vector<Step> steps_;
};

// What the steps that know digits take for one (Unicode 15: Nd, Nl, No; Rust's is_numeric).
bool IsNumeric(uint32_t code_point);

}  // namespace zeroshard
