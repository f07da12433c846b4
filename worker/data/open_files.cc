#include "worker/data/open_files.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/status_macros.h"
#include "common/text/documents.h"
#include "worker/data/input_files.h"
#include "worker/data/megatron.h"
#include "worker/data/text_tokens.h"
#include "worker/data/token_file.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kBom = "\xEF\xBB\xBF";
constexpr int64_t kByteVocabulary = 256;

bool IsFile(const std::string& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

absl::string_view AsText(absl::Span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The .bin file that an entry of data.train stands for when it is a Megatron pair's prefix or .idx.
std::string BinOf(const std::string& entry) {
  const absl::string_view prefix = absl::StripSuffix(entry, ".idx");
  const std::string bin = absl::StrCat(prefix, ".bin"), index = absl::StrCat(prefix, ".idx");
  std::error_code ignored;
  const bool named = prefix.size() < entry.size() || !fs::exists(entry, ignored);
  return named && IsFile(bin) && IsFile(index) ? bin : entry;
}

// The index that belongs to a file, whether it is there or not; empty if it cannot have one.
std::string IndexOf(const std::string& path) {
  absl::string_view prefix = path;
  return absl::ConsumeSuffix(&prefix, ".bin") ? absl::StrCat(prefix, ".idx") : "";
}

absl::Status CheckBoundaries(const v1::DataSpec& spec, const std::string& path,
                             const MegatronIndex* index) {
  if (!spec.packing().mask_documents()) return absl::OkStatus();
  if (index != nullptr ? index->has_documents() : spec.packing().has_separator()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "data.packing.mask_documents: ",
      index != nullptr
          ? absl::StrCat("the document indices of ", index->path(),
                         " do not reach its last sequence")
          : absl::StrCat("nothing in the token file ", path, " says where its documents end"),
      "; write data.packing.separator: ID, the id that ends each document (50256 for GPT-2's "
      "<|endoftext|>), or mask_documents: false"));
}

absl::StatusOr<TokenRun> OpenTokens(const v1::DataSpec& spec, int64_t vocab_size,
                                    const DatasetOptions& options) {
  ZS_ASSIGN_OR_RETURN(const TokenFormat format, TokenFormatOf(spec.format()));
  const bool pairs = format == TokenFormat::kAuto || format == TokenFormat::kMegatron;
  std::vector<std::string> entries(spec.train().begin(), spec.train().end());
  if (pairs) std::transform(entries.begin(), entries.end(), entries.begin(), BinOf);
  ZS_ASSIGN_OR_RETURN(const std::vector<InputFile> files,
                      ListInputFiles(entries, ".bin", options.key));
  TokenRun run(vocab_size);
  for (const InputFile& input : files) {
    ZS_ASSIGN_OR_RETURN(FileBytes bytes, FileBytes::Open(input.path));
    std::optional<FileBytes> index;
    const std::string index_path = IndexOf(input.path);
    if (pairs && !index_path.empty() && IsFile(index_path)) {
      ZS_ASSIGN_OR_RETURN(index, FileBytes::Open(index_path));
    }
    ZS_RETURN_IF_ERROR(AppendTokenFile(spec, vocab_size, input.path, std::move(bytes), index_path,
                                       std::move(index), &run));
  }
  return run;
}

// A text file for `tokenizer: bytes`, where it lies.
void AppendBytes(const std::string& path, FileBytes bytes, const v1::DataSpec& spec,
                 TokenRun* run) {
  const int64_t offset = absl::StartsWith(AsText(bytes.bytes()), kBom) ? kBom.size() : 0;
  const int64_t count = static_cast<int64_t>(bytes.bytes().size()) - offset;
  if (count == 0) return;
  if (spec.packing().mask_documents()) run->BeginDocument();
  run->Append({path, std::move(bytes), {offset, IdType::kUint8, count}});
  if (!spec.packing().has_separator()) return;
  const uint32_t separator = spec.packing().separator();
  run->Append({path,
               FileBytes::Of({reinterpret_cast<const char*>(&separator), sizeof(separator)}),
               {0, IdType::kUint32, 1}});
}

absl::StatusOr<std::shared_ptr<const Tokenizer>> TextTokenizer(const v1::DataSpec& spec,
                                                               int64_t vocab_size,
                                                               const DatasetOptions& options) {
  std::shared_ptr<const Tokenizer> tokenizer = options.tokenizer;
  if (tokenizer == nullptr || spec.tokenizer() == "bytes") {
    ZS_ASSIGN_OR_RETURN(tokenizer, Tokenizer::Load(spec.tokenizer()));
  }
  if (tokenizer->vocab_size() > vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the tokenizer ", spec.tokenizer(), " has ", tokenizer->vocab_size(),
        " tokens, but model.vocab_size is ", vocab_size, "; raise it to at least that"));
  }
  return tokenizer;
}

absl::StatusOr<TokenRun> OpenText(const v1::DataSpec& spec, int64_t vocab_size,
                                  const DatasetOptions& options) {
  const bool bytes_only = spec.tokenizer() == "bytes";
  if (bytes_only && vocab_size < kByteVocabulary) {
    return absl::InvalidArgumentError(absl::StrCat("model.vocab_size is ", vocab_size,
                                                   "; data.tokenizer bytes needs at least 256"));
  }
  ZS_ASSIGN_OR_RETURN(const std::vector<InputFile> files,
                      ListInputFiles({spec.train().begin(), spec.train().end()}, "", options.key));
  ZS_ASSIGN_OR_RETURN(const std::shared_ptr<const Tokenizer> tokenizer,
                      TextTokenizer(spec, vocab_size, options));
  TextTokens::Options text;
  text.tokenizer = tokenizer.get();
  if (!bytes_only) text.separator = tokenizer->end_of_text();
  if (spec.packing().has_separator()) {
    text.separator = static_cast<int32_t>(spec.packing().separator());
  }
  text.threads = options.threads > 0
                     ? options.threads
                     : std::max<int>(1, static_cast<int>(std::thread::hardware_concurrency()));
  TokenRun run(vocab_size);
  TextTokens tokens(text, &run);
  for (const InputFile& input : files) {
    ZS_ASSIGN_OR_RETURN(FileBytes bytes, FileBytes::Open(input.path));
    if (bytes.bytes().empty() && input.named) {
      return absl::InvalidArgumentError(
          absl::StrCat(options.key, " file ", input.path, " is empty (0 bytes)"));
    }
    ZS_ASSIGN_OR_RETURN(const TextFormat format,
                        TextFormatOf(input.path, spec.format(), AsText(bytes.bytes())));
    if (bytes_only && format == TextFormat::kText) {
      ZS_RETURN_IF_ERROR(tokens.Finish());
      AppendBytes(input.path, std::move(bytes), spec, &run);
      continue;
    }
    if (format == TextFormat::kText) {  // a copy is made of it
      ZS_RETURN_IF_ERROR(tokens.CheckRoom(static_cast<int64_t>(bytes.bytes().size())));
    }
    ZS_RETURN_IF_ERROR(
        ForEachDocument(input.path, AsText(bytes.bytes()), format,
                        [&](Document&& document) { return tokens.Add(std::move(document)); }));
  }
  ZS_RETURN_IF_ERROR(tokens.Finish());
  return run;
}

}  // namespace

absl::Status AppendTokenFile(const v1::DataSpec& spec, int64_t vocab_size, const std::string& path,
                             FileBytes bytes, const std::string& index_path,
                             std::optional<FileBytes> index, TokenRun* run) {
  ZS_ASSIGN_OR_RETURN(const TokenFormat format, TokenFormatOf(spec.format()));
  TokenRun::Piece piece{.path = path, .bytes = std::move(bytes), .layout = {}};
  const absl::Span<const uint8_t> content = piece.bytes.bytes();
  if (index.has_value() && format == TokenFormat::kAuto) {
    if (!MegatronIndex::HasMagic(index->bytes())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "token file ", path, ": beside it lies ", index_path,
          ", which is no Megatron index; write data.format: llm.c, nanogpt or megatron"));
    }
    const absl::StatusOr<TokenLayout> header =
        RecognizeTokenFile(path, content, TokenFormat::kLlmC);
    if (header.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("token file ", path,
                       ": starts with llm.c's header, and beside it lies the Megatron index ",
                       index_path, "; write data.format: llm.c or megatron"));
    }
  }
  if (index.has_value()) {
    ZS_ASSIGN_OR_RETURN(MegatronIndex parsed,
                        MegatronIndex::Parse(index_path, *std::move(index), content.size()));
    piece.layout = parsed.layout();
    piece.index = std::make_shared<const MegatronIndex>(std::move(parsed));
  } else if (format == TokenFormat::kMegatron) {
    return absl::InvalidArgumentError(absl::StrCat(
        "token file ", path, ": data.format is megatron, but ",
        index_path.empty() ? "its name does not end in .bin" : index_path + " is not there",
        "; name PREFIX.bin, with PREFIX.idx beside it"));
  } else {
    ZS_ASSIGN_OR_RETURN(piece.layout, RecognizeTokenFile(path, content, format));
    if (spec.packing().has_separator()) {
      piece.separator = static_cast<int32_t>(spec.packing().separator());
    }
  }
  if (piece.layout.count == 0) {
    return absl::InvalidArgumentError(absl::StrCat("token file ", path, ": holds no tokens"));
  }
  ZS_RETURN_IF_ERROR(CheckTokenIds(path, content, piece.layout, vocab_size));
  ZS_RETURN_IF_ERROR(CheckBoundaries(spec, path, piece.index.get()));
  piece.bytes.DropPages();
  if (spec.packing().mask_documents()) run->BeginDocument();
  run->Append(std::move(piece));
  return absl::OkStatus();
}

absl::StatusOr<TokenRun> OpenFiles(const v1::DataSpec& spec, int64_t vocab_size,
                                   const DatasetOptions& options) {
  if (vocab_size < 1 || vocab_size > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("model.vocab_size is ", vocab_size, "; wanted one from 1 to 2147483647"));
  }
  if (spec.packing().has_separator() && spec.packing().separator() >= vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat("data.packing.separator is ",
                                                   spec.packing().separator(),
                                                   ", not below model.vocab_size, ", vocab_size));
  }
  if (spec.tokenizer() == "tokens") return OpenTokens(spec, vocab_size, options);
  if (spec.tokenizer().empty() && options.tokenizer == nullptr) {
    return absl::InvalidArgumentError(
        "data.tokenizer is empty; wanted bytes (any file, one token a byte), tokens (files of ids) "
        "or the path of a tokenizer.json");
  }
  return OpenText(spec, vocab_size, options);
}

}  // namespace zeroshard
