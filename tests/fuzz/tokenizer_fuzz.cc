// A tokenizer.json is refused, or encodes any text to ids that it has and that decode.
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "common/tokenizer/bpe_tokenizer.h"
#include "common/tokenizer/tokenizer_json.h"
#include "tests/fuzz/fuzz_target.h"

namespace zeroshard {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "a tokenizer was accepted, but %s\n", what);
  std::abort();
}

void Check(const BpeTokenizer& tokenizer, absl::string_view text) {
  std::vector<int32_t> ids;
  tokenizer.Encode(text, &ids);
  // A byte is a token at most, but that normalization makes some characters longer, that each piece
  // may get a space, and that a byte that is no text becomes a character of three.
  Require(ids.size() <= 12 * text.size() + 1, "it makes more tokens than the text has bytes");
  for (const int32_t id : ids) {
    Require(id >= 0 && id < tokenizer.vocab_size(), "an id is not of its vocabulary");
  }
  Require(tokenizer.Decode(ids, false).ok(), "its own ids do not decode");
  std::vector<int32_t> parts;
  const size_t cut = tokenizer.SafeCut(text, text.size() / 3, text.size());
  Require(cut <= text.size(), "it would cut behind the end");
  tokenizer.Encode(text.substr(0, cut), &parts);
  tokenizer.Encode(text.substr(cut), &parts);
  Require(parts == ids, "the parts of a text give other ids");
}

}  // namespace

std::vector<std::string> FuzzSeeds() {
  const std::string model =
      R"("model":{"type":"BPE","dropout":null,"unk_token":null,"ignore_merges":true,"vocab":{)"
      R"("a":0,"b":1,"c":2,"Ġ":3,"ab":4,"Ġab":5,"Ċ":6,"<e>":7,"1":8,"Ã":9,"©":10,"Ã©":11},)"
      R"("merges":[["a","b"],["Ġ","ab"],"Ã ©"]}})";
  const std::string byte_level =
      R"({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true})";
  const std::string qwen2 =
      R"({"type":"Split","pattern":{"Regex":"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?)"
      R"(\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},)"
      R"("behavior":"Isolated","invert":false})";
  const std::vector<std::string> seeds = {
      R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,)"
      R"("pre_tokenizer":)" +
          byte_level + R"(,"post_processor":null,"decoder":{"type":"ByteLevel"},)" + model,
      R"({"added_tokens":[{"id":7,"content":"<e>","single_word":false,"lstrip":true,"rstrip":true,)"
      R"("normalized":false,"special":true},{"id":12,"content":"c a","single_word":true,)"
      R"("normalized":true,"special":false}],"normalizer":{"type":"Sequence","normalizers":[)"
      R"({"type":"NFC"}]},"pre_tokenizer":{"type":"Sequence","pretokenizers":[)"
      R"({"type":"Digits","individual_digits":true},)" +
          qwen2 + "," + byte_level +
          R"(]},"post_processor":{"type":"ByteLevel"},"decoder":{"type":"ByteLevel"},)" + model,
  };
  for (const std::string& seed : seeds) {
    Require(ParseTokenizerJson("seed", seed).ok(), "a seed is not");
  }
  return seeds;
}

}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view json(reinterpret_cast<const char*>(data), size);
  auto parts = zeroshard::ParseTokenizerJson("input", json);
  if (!parts.ok()) return 0;
  const zeroshard::BpeTokenizer tokenizer(*std::move(parts), std::nullopt);
  zeroshard::Check(tokenizer, "ab ab  abc1c a<e> \n\nc ae\xCC\x81 \xC3\xA9\xFF\xE2\x82 ab\t<e>cab");
  zeroshard::Check(tokenizer, json);  // as a text
  return 0;
}
