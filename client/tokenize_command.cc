#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/command.h"
#include "client/console.h"
#include "client/render.h"
#include "client/tokenize_files.h"
#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/status_macros.h"
#include "common/tokenizer/tokenizer.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kRedrawInterval = absl::Milliseconds(100);
constexpr int kMostThreads = 1024;

struct TokenizeFlags {
  TokenizeOptions files;
  std::string tokenizer;
  std::string separator;  // empty: the tokenizer's
};

// What follows every document; nothing for "none", and where the tokenizer has no such token.
absl::StatusOr<std::optional<int32_t>> SeparatorOf(const TokenizeFlags& flags,
                                                   const Tokenizer& tokenizer) {
  if (flags.separator.empty()) return tokenizer.end_of_text();
  if (flags.separator == "none") return std::nullopt;
  int32_t id = 0;
  const char* end = flags.separator.data() + flags.separator.size();
  const auto parsed = std::from_chars(flags.separator.data(), end, id);
  if (parsed.ec != std::errc() || parsed.ptr != end) {
    return absl::InvalidArgumentError(
        absl::StrCat("--separator is ", flags.separator, "; a token id or none is wanted"));
  }
  return id;
}

double Megabytes(int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

// "tokenizing [#####     ]  52 %  120/231 MB  41.0 MB/s  3 s left".
std::string ProgressBar(const TokenizeProgress& progress, double seconds) {
  constexpr int kCells = 24;
  const double done =
      progress.total_bytes == 0
          ? 1
          : std::min(1.0, static_cast<double>(progress.bytes) / progress.total_bytes);
  const int cells = static_cast<int>(std::lround(done * kCells));
  const double speed = seconds > 0 ? Megabytes(progress.bytes) / seconds : 0;
  std::string line = absl::StrFormat(
      "tokenizing [%s%s] %3d %%  %s/%s MB  %.1f MB/s", std::string(cells, '#'),
      std::string(kCells - cells, ' '), static_cast<int>(done * 100),
      FormatCount(Megabytes(progress.bytes)), FormatCount(Megabytes(progress.total_bytes)), speed);
  if (speed > 0 && done < 1) {
    absl::StrAppend(&line, "  ",
                    FormatDuration(Megabytes(progress.total_bytes - progress.bytes) / speed),
                    " left");
  }
  return line;
}

absl::StatusOr<int> Tokenize(const CommandContext& context, TokenizeFlags flags) {
  ZS_ASSIGN_OR_RETURN(const std::shared_ptr<const Tokenizer> tokenizer,
                      Tokenizer::Load(flags.tokenizer));
  ZS_ASSIGN_OR_RETURN(flags.files.separator, SeparatorOf(flags, *tokenizer));
  if (flags.files.threads == 0) {
    flags.files.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  }
  const bool json = context.options.json();
  const SystemClock clock;
  const absl::Duration start = clock.Now();
  const auto seconds = [&] { return absl::ToDoubleSeconds(clock.Now() - start); };
  Console console(*context.env);
  absl::Duration drawn = start - kRedrawInterval;
  ZS_ASSIGN_OR_RETURN(const TokenizeProgress result,
                      TokenizeFiles(*tokenizer, flags.files, [&](const TokenizeProgress& progress) {
                        if (json || clock.Now() - drawn < kRedrawInterval) return;
                        drawn = clock.Now();
                        console.Live(ProgressBar(progress, seconds()));
                      }));
  const double taken = seconds();
  const double speed = taken > 0 ? Megabytes(result.bytes) / taken : 0;
  const std::optional<int32_t> separator = flags.files.separator;
  if (json) {
    nlohmann::ordered_json answer = {{"output", flags.files.output},
                                     {"documents", result.documents},
                                     {"tokens", result.tokens},
                                     {"vocab_size", tokenizer->vocab_size()},
                                     {"separator", nullptr},
                                     {"bytes", result.bytes},
                                     {"seconds", taken},
                                     {"megabytes_per_second", speed}};
    if (separator.has_value()) answer["separator"] = *separator;
    *context.env->out << JsonLine(answer) << "\n";
    return kExitOk;
  }
  console.Print(absl::StrFormat(
      "%s: %s documents, %s tokens of a vocabulary of %s, %s; %s MB in %s, %.1f MB/s",
      flags.files.output, FormatCount(static_cast<double>(result.documents)),
      FormatCount(static_cast<double>(result.tokens)),
      FormatCount(static_cast<double>(tokenizer->vocab_size())),
      separator.has_value() ? absl::StrCat("token ", *separator, " after each document")
                            : "nothing between documents",
      absl::StrFormat("%.1f", Megabytes(result.bytes)), FormatDuration(taken), speed));
  return kExitOk;
}

}  // namespace

void AddTokenizeCommand(CLI::App* app, CommandContext* context) {
  const auto flags = std::make_shared<TokenizeFlags>();
  flags->files.threads = 0;
  CLI::App* tokenize = AddCommand(
      app, context, "tokenize", "Turns text into a file of tokens to train on",
      [context, flags] { return Tokenize(*context, *flags); }, /*remote=*/false);
  tokenize
      ->add_option("input", flags->files.inputs,
                   "Text files, JSON lines (.jsonl, .ndjson), or folders of them")
      ->type_name("IN...")
      ->required();
  tokenize->add_option("-o,--out", flags->files.output, "The token file to write")
      ->type_name("OUT.bin")
      ->required();
  tokenize
      ->add_option("--tokenizer", flags->tokenizer,
                   "bytes, a tokenizer.json, or a folder that holds one")
      ->type_name("TOKENIZER")
      ->required();
  tokenize
      ->add_option("--format", flags->files.format,
                   "What the files hold; auto goes by their names' ends")
      ->check(CLI::IsMember({"auto", "text", "jsonl"}))
      ->type_name("auto|text|jsonl")
      ->default_val("auto");
  tokenize
      ->add_option("--separator", flags->separator,
                   "The token after each document (default: the one that the tokenizer ends a text "
                   "with, if it has one)")
      ->type_name("ID|none");
  tokenize->add_option("--threads", flags->files.threads, "Threads; 0: one a core")
      ->check(CLI::Range(0, kMostThreads))
      ->type_name("N");
}

}  // namespace zeroshard
