// A token file, with a Megatron index or without, is refused, or every id and every document in it
// can be read.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "tests/fuzz/fuzz_target.h"
#include "worker/data/open_files.h"

namespace zeroshard {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "accepted a token file although %s\n", what);
  std::abort();
}

template <typename T>
std::string Raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// An input: a byte of choices, the length of the index in 16 bits, the index, the ids.
//   bits 0-1 of the choices: the format; 2: there is an index; 3: documents are masked; 4: there is
//   a separator; 5: a large vocabulary
std::string Input(uint8_t choices, const std::string& index, const std::string& ids) {
  return Raw<uint8_t>({choices}) + Raw<uint16_t>({static_cast<uint16_t>(index.size())}) + index +
         ids;
}

std::string Header(int32_t magic, int32_t version, int32_t count) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return Raw(header);
}

std::string Index(uint8_t code, const std::vector<int32_t>& lengths,
                  const std::vector<int64_t>& pointers, const std::vector<int64_t>& documents) {
  return std::string("MMIDIDX\0\0", 9) + Raw<uint64_t>({1}) + Raw<uint8_t>({code}) +
         Raw<uint64_t>({lengths.size(), documents.size()}) + Raw(lengths) + Raw(pointers) +
         Raw(documents);
}

void ReadAll(const TokenRun& run, int64_t vocab) {
  std::vector<int32_t> ids(run.size());
  Require(run.Read(0, absl::MakeSpan(ids)).ok(), "its ids cannot be read");
  for (const int32_t id : ids) Require(id >= 0 && id < vocab, "an id is not in the vocabulary");
  const auto begins = run.DocumentBegins(0, run.size());
  Require(begins.ok(), "its documents cannot be read");
  Require(std::is_sorted(begins->begin(), begins->end()), "documents are out of order");
  // In pieces, as samples are read, the same documents begin.
  std::vector<int64_t> again;
  for (int64_t at = 0; at < run.size(); at += 7) {
    const auto some = run.DocumentBegins(at, std::min(at + 7, run.size()));
    Require(some.ok(), "a part of its documents cannot be read");
    again.insert(again.end(), some->begin(), some->end());
  }
  Require(again == *begins, "its parts have other documents");
}

}  // namespace

std::vector<std::string> FuzzSeeds() {
  return {
      Input(0b001000, "", Raw<uint16_t>({1, 2, 3, 4, 255, 7})),
      Input(0b011000, "", Header(20240520, 1, 5) + Raw<uint16_t>({1, 2, 3, 2, 5})),
      Input(0b111001, "", Header(20240801, 7, 3) + Raw<uint32_t>({1, 70000, 2})),
      Input(0b011010, "", Raw<uint16_t>({1, 0, 2, 0, 9})),
      Input(0b001100, Index(8, {2, 0, 3}, {0, 4, 4}, {0, 1, 1, 3}), Raw<uint16_t>({1, 2, 3, 4, 5})),
      Input(0b101111, Index(4, {3}, {0}, {0, 1}), Raw<int32_t>({1, 70000, 3})),
      Input(0b101100, Index(5, {1, 1}, {0, 8}, {0, 2}), Raw<int64_t>({70000, 3})),
      Input(0b000111, Index(1, {4}, {0}, {0}), Raw<uint8_t>({1, 2, 3, 255})),
  };
}

}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace zeroshard;
  if (size < 3) return 0;
  static constexpr const char* kFormats[] = {"auto", "llm.c", "nanogpt", "megatron"};
  const uint8_t choices = data[0];
  const bool pair = (choices & 4) != 0 && ((choices & 3) == 0 || (choices & 3) == 3);
  uint16_t length;
  std::memcpy(&length, data + 1, sizeof(length));
  const std::string rest(reinterpret_cast<const char*>(data) + 3, size - 3);

  v1::DataSpec spec;
  spec.set_tokenizer("tokens");
  spec.set_format(kFormats[choices & 3]);
  spec.mutable_packing()->set_mask_documents((choices & 8) != 0);
  if ((choices & 16) != 0) spec.mutable_packing()->set_separator(2);
  const int64_t vocab = (choices & 32) != 0 ? 100000 : 256;
  std::optional<FileBytes> index;
  std::string ids = rest;
  if (pair) {
    const size_t cut = std::min<size_t>(length, rest.size());
    index = FileBytes::Of(rest.substr(0, cut));
    ids = rest.substr(cut);
  }
  TokenRun run(vocab);
  const absl::Status status = AppendTokenFile(
      spec, vocab, "input.bin", FileBytes::Of(std::move(ids)), "input.idx", std::move(index), &run);
  if (status.ok()) ReadAll(run, vocab);
  return 0;
}
