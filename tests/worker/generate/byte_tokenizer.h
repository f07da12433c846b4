// The smallest tokenizer.json with a template.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace zeroshard {

// Ids are bytes, except 256, which is the end of a text and, as a template says, its beginning.
inline std::string ByteTokenizerJson() {
  using Json = nlohmann::json;
  Json vocab = Json::object();
  // GPT-2's printable names of bytes: what is printable is itself, the rest follows from U+0100 on.
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) ||
                           (byte >= 0xAE && byte <= 0xFF);
    const int point = printable ? byte : next++;
    std::string name;
    if (point < 0x80) {
      name.push_back(static_cast<char>(point));
    } else {
      name.push_back(static_cast<char>(0xC0 | point >> 6));
      name.push_back(static_cast<char>(0x80 | (point & 0x3F)));
    }
    vocab[name] = byte;
  }
  const auto special = [](int id, const char* content) {
    return Json{{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", true}};
  };
  const Json json = {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", {special(255 + 1, "<|endoftext|>")}},
      {"normalizer", nullptr},
      {"pre_tokenizer",
       {{"type", "ByteLevel"},
        {"add_prefix_space", false},
        {"trim_offsets", true},
        {"use_regex", true}}},
      {"post_processor",
       {{"type", "Sequence"},
        {"processors",
         {{{"type", "ByteLevel"},
           {"add_prefix_space", true},
           {"trim_offsets", false},
           {"use_regex", true}},
          {{"type", "TemplateProcessing"},
           {"single",
            {{{"SpecialToken", {{"id", "<|endoftext|>"}, {"type_id", 0}}}},
             {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
           {"pair", Json::array()},
           {"special_tokens",
            {{"<|endoftext|>",
              {{"id", "<|endoftext|>"}, {"ids", {256}}, {"tokens", {"<|endoftext|>"}}}}}}}}}}},
      {"decoder",
       {{"type", "ByteLevel"},
        {"add_prefix_space", true},
        {"trim_offsets", true},
        {"use_regex", true}}},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"continuing_subword_prefix", nullptr},
        {"end_of_word_suffix", nullptr},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"vocab", vocab},
        {"merges", Json::array()}}}};
  return json.dump();
}

}  // namespace zeroshard
