#include "common/spec/data_section.h"

#include <map>
#include <string>
#include <vector>

#include "common/spec/checks.h"
#include "common/spec/job_spec.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

constexpr uint32_t kByteVocabulary = 256;
constexpr uint32_t kDefaultSampleTokens = 32;
constexpr int kMostPrompts = 64;
constexpr size_t kMostPromptBytes = 64 << 10;

template <typename Paths>
absl::Status CheckPaths(const char* key, const Paths& paths) {
  for (int i = 0; i < paths.size(); ++i) {
    if (paths.Get(i).empty()) return Bad(key, ".", i, ": empty, wanted a file or a folder");
    ZS_RETURN_IF_ERROR(CheckPath(absl::StrCat(key, ".", i), paths.Get(i)));
  }
  return absl::OkStatus();
}

// What a tokenizer of three kinds can read.
absl::Status NormaliseFormat(v1::DataSpec* data) {
  if (data->format().empty()) data->set_format("auto");
  if (data->tokenizer() == "tokens") {
    return CheckChoice("data.format", data->format(), {"auto", "llm.c", "nanogpt", "megatron"});
  }
  return CheckChoice("data.format", data->format(), {"auto", "text", "jsonl"});
}

absl::Status NormaliseTraining(v1::JobSpec* spec) {
  v1::DataSpec* data = spec->mutable_data();
  if (data->train().empty()) {
    return Bad(
        "data.train: missing; name the files or folders to train on, for example data: "
        "{train: [/usr/share/common-licenses], tokenizer: bytes}");
  }
  ZS_RETURN_IF_ERROR(CheckPaths("data.train", data->train()));
  const std::string& tokenizer = data->tokenizer();
  if (tokenizer.empty()) {
    return Bad(
        "data.tokenizer: missing; write bytes for text as it is, the path of a tokenizer.json, or "
        "tokens for files of token ids");
  }
  ZS_RETURN_IF_ERROR(CheckPath("data.tokenizer", tokenizer));
  if (!IsTokenizerPath(tokenizer) && tokenizer != "bytes" && tokenizer != "tokens") {
    return Bad(
        "data.tokenizer: seen ", Shown(tokenizer),
        ", wanted bytes, tokens, or the path of a tokenizer.json or of its folder (a path has "
        "a / or a . in it: write ./",
        tokenizer, " for a folder here)");
  }
  const uint32_t vocabulary = spec->model().vocab_size();
  if (tokenizer == "bytes" && vocabulary < kByteVocabulary) {
    return Bad("model.vocab_size: seen ", vocabulary, ", wanted at least ", kByteVocabulary,
               ", because data.tokenizer is bytes");
  }
  if (data->packing().has_separator() && data->packing().separator() >= vocabulary) {
    return Bad("data.packing.separator: seen ", data->packing().separator(),
               ", wanted a token id below model.vocab_size, ", vocabulary);
  }
  return NormaliseFormat(data);
}

absl::Status NormaliseEval(v1::JobSpec* spec) {
  if (!spec->has_eval()) return absl::OkStatus();
  v1::EvalSpec* eval = spec->mutable_eval();
  if (eval->data().empty()) {
    return Bad(
        "eval.data: missing; name the files or folders whose loss is measured, for example eval: "
        "{data: [val.bin], interval_steps: 100}");
  }
  ZS_RETURN_IF_ERROR(CheckPaths("eval.data", eval->data()));
  if (eval->interval_steps() == 0) {
    return Bad(
        "eval.interval_steps: missing or 0; write after how many steps the loss is measured");
  }
  ZS_RETURN_IF_ERROR(CheckCount("eval.interval_steps", eval->interval_steps(), 1, kMaxCount));
  return CheckCount("eval.batches", eval->batches(), 0, kMaxCount);
}

absl::Status NormaliseSample(v1::JobSpec* spec) {
  if (!spec->has_sample()) return absl::OkStatus();
  v1::SampleSpec* sample = spec->mutable_sample();
  if (sample->prompts().empty()) {
    return Bad("sample.prompts: missing; write the texts to go on from, for example [\"The \"]");
  }
  if (sample->prompts_size() > kMostPrompts) {
    return Bad("sample.prompts: seen ", sample->prompts_size(), ", wanted at most ", kMostPrompts);
  }
  std::map<std::string, int> seen;
  for (int i = 0; i < sample->prompts_size(); ++i) {
    if (sample->prompts(i).empty()) return Bad("sample.prompts.", i, ": empty, wanted a text");
    if (const size_t bytes = sample->prompts(i).size(); bytes > kMostPromptBytes) {
      return Bad("sample.prompts.", i, ": seen ", bytes, " bytes, wanted at most ",
                 kMostPromptBytes);
    }
    const auto [first, is_new] = seen.emplace(sample->prompts(i), i);
    if (!is_new) {
      return Bad("sample.prompts.", i, ": the same as sample.prompts.", first->second,
                 ", whose answer it would have");
    }
  }
  if (spec->data().tokenizer() == "tokens") {
    return Bad(
        "sample: data.tokenizer is tokens, so there is nothing to read the prompts with; name the "
        "tokenizer.json there, or remove the section");
  }
  if (sample->interval_steps() == 0) {
    return Bad("sample.interval_steps: missing or 0; write after how many steps to sample");
  }
  ZS_RETURN_IF_ERROR(CheckCount("sample.interval_steps", sample->interval_steps(), 1, kMaxCount));
  if (sample->max_tokens() == 0) sample->set_max_tokens(kDefaultSampleTokens);
  if (!sample->has_temperature()) sample->set_temperature(0);
  return CheckReal("sample.temperature", sample->temperature(), sample->temperature() >= 0,
                   "0 (the likeliest token) or more");
}

}  // namespace

absl::Status NormaliseData(v1::JobSpec* spec) {
  ZS_RETURN_IF_ERROR(NormaliseTraining(spec));
  ZS_RETURN_IF_ERROR(NormaliseEval(spec));
  return NormaliseSample(spec);
}

absl::Status NormaliseCheckpoint(v1::JobSpec* spec) {
  if (!spec->has_checkpoint()) return absl::OkStatus();
  const v1::CheckpointSpec& checkpoint = spec->checkpoint();
  if (checkpoint.dir().empty()) {
    return Bad(
        "checkpoint.dir: missing; name a folder that every worker reaches, or remove the section "
        "to write no checkpoints");
  }
  ZS_RETURN_IF_ERROR(CheckPath("checkpoint.dir", checkpoint.dir()));
  ZS_RETURN_IF_ERROR(
      CheckCount("checkpoint.interval_steps", checkpoint.interval_steps(), 0, kMaxCount));
  return CheckCount("checkpoint.keep_every", checkpoint.keep_every(), 0, kMaxCount);
}

}  // namespace zeroshard
