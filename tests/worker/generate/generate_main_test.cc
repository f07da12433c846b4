#include "worker/generate/generate_main.h"

#include <gmock/gmock.h>
#include <pty.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "common/checkpoint/files.h"
#include "common/checkpoint/store.h"
#include "common/exit_codes.h"
#include "common/hf/export.h"
#include "common/safetensors/safetensors.h"
#include "common/text/shown.h"
#include "tests/common/temp_folder.h"
#include "tests/worker/generate/byte_tokenizer.h"
#include "tests/worker/generate/tiny_model.h"
#include "worker/generate/continuation.h"
#include "worker/generate/model_files.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Json = nlohmann::json;

void Write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// The bytes of a prompt, behind `before`.
std::vector<int32_t> Ids(const std::string& text, std::vector<int32_t> before = {}) {
  ByteTokens().Encode(text, &before);
  return before;
}

class GenerateTest : public testing::Test {
 protected:
  // A Hugging Face folder of the reference model `name`.
  std::string MakeFolder(const std::string& name) {
    const Reference reference = *Reference::Load(name);
    const std::string folder = temp_ / name;
    HfExportOptions options;
    options.dtype = DType::kF32;
    const absl::Status written =
        ExportHfFolder(reference.spec().model(), ReferenceSource(&reference), folder, options);
    EXPECT_TRUE(written.ok()) << written;
    return folder;
  }

  // A folder of checkpoints with one of the reference model's initial weights.
  std::string MakeCheckpoints(const std::string& name, const std::string& tokenizer,
                              const std::vector<HfAsset>& assets = {}) {
    const Reference reference = *Reference::Load(name);
    const std::string dir = temp_ / "checkpoints";
    CheckpointStoreOptions options;
    options.dir = dir;
    options.job = "tiny";
    options.run_id = "tiny-1";
    const auto store = CheckpointStore::Open(&FileSystem::Real(), options);
    EXPECT_TRUE(store.ok()) << store.status();
    const std::string collect = *(*store)->Begin(30);
    std::vector<std::vector<float>> values;
    std::vector<StatePiece> pieces;
    for (const UnitTable& unit : reference.table().units) {
      for (const ParameterInfo& tensor : unit.parameters) {
        values.push_back(*reference.Tensor("initial", tensor.name));
        pieces.push_back({.kind = StateKind::kMaster,
                          .tensor = tensor.name,
                          .shape = tensor.shape,
                          .begin = 0,
                          .end = tensor.size,
                          .values = values.back().data()});
      }
    }
    Manifest manifest;
    manifest.run_id = "tiny-1";
    manifest.job = "tiny";
    manifest.step = 30;
    manifest.unix_ms = 1;
    manifest.world_size = 1;
    manifest.spec = reference.spec();
    manifest.spec.mutable_data()->set_tokenizer(tokenizer);
    manifest.files = {*WriteStateFile(&FileSystem::Real(), collect, 0, 1, pieces)};
    std::map<std::string, std::string> carried;
    for (const HfAsset& asset : assets) carried[asset.name] = asset.source;
    const auto contents = ReadAssets(carried);
    EXPECT_TRUE(contents.ok()) << contents.status();
    EXPECT_TRUE(WriteAssets(&FileSystem::Real(), *contents, collect, &manifest.files).ok());
    const auto complete = (*store)->Complete(manifest);
    EXPECT_TRUE(complete.ok()) << complete.status();
    return dir;
  }

  // What the program prints in JSON.
  Json Run(GenerateOptions options) {
    options.json = true;
    std::ostringstream out, err;
    const absl::Status status = Generate(options, &out, &err);
    EXPECT_TRUE(status.ok()) << status;
    err_ = err.str();
    return Json::parse(out.str(), nullptr, false);
  }
  std::string Refused(const GenerateOptions& options) {
    std::ostringstream out, err;
    const absl::Status status = Generate(options, &out, &err);
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  }

  TempFolder temp_;
  std::string err_;
};

// The answer itself is transformers' (generator_test.cc); here it must come through the files.
std::vector<int32_t> Greedy(const std::string& name, const std::vector<int32_t>& prompt,
                            int64_t max_tokens, const std::set<int32_t>& ends = {}) {
  TinyModel tiny(name);
  return Continue({.prompt = prompt, .max_tokens = max_tokens, .end_of_text = ends},
                  tiny.generator.get(), tiny.parameters.get())
      ->tokens;
}

TEST_F(GenerateTest, AHuggingFaceFolderAnswersAsItsModel) {
  for (const char* name : {"gpt2", "llama"}) {
    const Json json =
        Run({.model = MakeFolder(name), .prompt = "Hello", .tokenizer = "bytes", .max_tokens = 12});
    EXPECT_EQ(json["prompt_tokens"].get<std::vector<int32_t>>(), Ids("Hello"));
    EXPECT_EQ(json["tokens"].get<std::vector<int32_t>>(), Greedy(name, Ids("Hello"), 12));
    EXPECT_EQ(json["stop"], "max_tokens");
    EXPECT_EQ(json["prompt"], "Hello");
    EXPECT_GT(json["seconds"], 0);
  }
}

TEST_F(GenerateTest, ACheckpointAnswersAsItsModelWithTheTokenizerItWasTrainedWith) {
  const std::string dir = MakeCheckpoints("llama", "bytes");
  const std::vector<int32_t> wanted = Greedy("llama", Ids("a b"), 9);
  for (const std::string& path : {dir, dir + "/step-00000030"}) {
    const Json json = Run({.model = path, .prompt = "a b", .max_tokens = 9});
    EXPECT_EQ(json["tokens"].get<std::vector<int32_t>>(), wanted);
    EXPECT_EQ(json["model"], dir + "/step-00000030");
  }
}

// Wherever the job read its tokenizer from, the checkpoint has it.
TEST_F(GenerateTest, ACheckpointAnswersWithTheTokenizerThatItCarries) {
  Write(temp_ / "mine.json", ByteTokenizerJson());
  Write(temp_ / "tokenizer_config.json", R"({"eos_token": "<|endoftext|>"})");
  const std::string dir =
      MakeCheckpoints("llama", temp_ / "mine.json", TokenizerAssets(temp_ / "mine.json"));
  std::filesystem::remove(temp_ / "mine.json");
  const Json json = Run({.model = dir, .prompt = "a b", .max_tokens = 9});
  EXPECT_EQ(json["prompt_tokens"].get<std::vector<int32_t>>(), Ids("a b", {256}));
  EXPECT_EQ(json["tokens"].get<std::vector<int32_t>>(),
            Greedy("llama", Ids("a b", {256}), 9, {256}));
}

TEST_F(GenerateTest, TextIsThePromptAndWhatFollows) {
  const GenerateOptions options{
      .model = MakeFolder("gpt2"), .prompt = "Hello", .tokenizer = "bytes", .max_tokens = 12};
  std::ostringstream out, err;
  ASSERT_TRUE(Generate(options, &out, &err).ok());
  EXPECT_EQ(out.str(), "Hello" + Run(options)["text"].get<std::string>() + "\n");
  EXPECT_THAT(err.str(), HasSubstr("12 tokens after 5"));
}

// A model that is hot enough says anything, escape sequences too.
TEST_F(GenerateTest, ATerminalIsNotCommandedByWhatAModelSays) {
  GenerateOptions options{.model = MakeFolder("gpt2"),
                          .prompt = "a\x1b[2J\xc2\x9b\xe2\x80\xae\n\tz",
                          .tokenizer = "bytes",
                          .max_tokens = 100,
                          .sampling = {.temperature = 50, .seed = 1}};
  const auto output = [&] {
    std::ostringstream out, err;
    EXPECT_TRUE(Generate(options, &out, &err).ok());
    return out.str();
  };
  const auto commands = [](absl::string_view text) {
    return std::count_if(text.begin(), text.end(), [](char c) {
      return (c >= 0 && c < ' ' && c != '\n' && c != '\t') || c == '\x7f';
    });
  };
  const std::string piped = output();
  EXPECT_EQ(piped.substr(0, options.prompt.size()), options.prompt);
  EXPECT_GT(commands(piped.substr(options.prompt.size())), 0) << "or this shows nothing";
  options.terminal = true;
  const std::string seen = output();
  EXPECT_EQ(commands(seen), 0) << absl::CHexEscape(seen);
  EXPECT_TRUE(absl::StartsWith(seen, "a\\x1b[2J\\u009b\\u202e\n\tz")) << absl::CHexEscape(seen);
  EXPECT_EQ(seen, Shown(piped, SIZE_MAX, Layout::kKept));
  options.json = true;
  const std::string json = output();
  EXPECT_TRUE(std::all_of(json.begin(), json.end(), [](char c) {
    return c == '\n' || (c >= ' ' && c < '\x7f');
  })) << json;
  EXPECT_EQ(Json::parse(json)["prompt"], options.prompt);
}

TEST_F(GenerateTest, TheProgramKnowsATerminal) {
  const std::string model = "--model=" + MakeFolder("gpt2");
  char program[] = "generate", prompt[] = "--prompt=\x1b[2J", tokenizer[] = "--tokenizer=bytes",
       most[] = "--max-tokens=1";
  char* argv[] = {program, const_cast<char*>(model.c_str()), prompt, tokenizer, most, nullptr};
  int terminal = -1, end = -1;
  ASSERT_EQ(openpty(&terminal, &end, nullptr, nullptr, nullptr), 0);
  std::cout.flush();
  const int saved = dup(STDOUT_FILENO);
  dup2(end, STDOUT_FILENO);
  const int code = GenerateMain(5, argv);
  std::cout.flush();
  dup2(saved, STDOUT_FILENO);
  close(saved);
  char seen[256] = {};
  const ssize_t got = read(terminal, seen, sizeof(seen) - 1);
  close(end);
  close(terminal);
  EXPECT_EQ(code, kExitOk);
  ASSERT_GT(got, 0);
  EXPECT_TRUE(absl::StartsWith(seen, "\\x1b[2J")) << absl::CHexEscape(seen);
}

TEST_F(GenerateTest, AMessageMovesNoCursor) {
  char program[] = "generate", model[] = "--model=/no/\x1b[2J", prompt[] = "--prompt=x";
  char* argv[] = {program, model, prompt, nullptr};
  testing::internal::CaptureStderr();
  EXPECT_EQ(GenerateMain(3, argv), kExitNotFound);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("/no/\\x1b[2J"), Not(HasSubstr("\x1b"))));
}

TEST_F(GenerateTest, TheFoldersTokenizerBeginsAndEndsTexts) {
  const std::string folder = MakeFolder("gpt2");
  Write(folder + "/tokenizer.json", ByteTokenizerJson());
  const std::vector<int32_t> prompt = Ids("Hi", {256});
  const std::vector<int32_t> endless = Greedy("gpt2", prompt, 20);
  // The model's own end, which generation_config.json names, is the third token of the answer.
  Write(folder + "/generation_config.json", Json{{"eos_token_id", {endless[2], 256}}}.dump());
  const Json json = Run({.model = folder, .prompt = "Hi", .max_tokens = 20});
  EXPECT_EQ(json["prompt_tokens"].get<std::vector<int32_t>>(), prompt);
  EXPECT_EQ(json["tokens"].get<std::vector<int32_t>>(),
            Greedy("gpt2", prompt, 20, {endless[2], 256}));
  EXPECT_EQ(json["stop"], "end_of_text");
  // A template that begins a text makes an empty prompt one.
  EXPECT_EQ(Run({.model = folder, .max_tokens = 1})["prompt_tokens"], Json({256}));
}

TEST_F(GenerateTest, SamplingAndBf16AreHonoured) {
  GenerateOptions options{.model = MakeFolder("gpt2"),
                          .prompt = "Hello",
                          .tokenizer = "bytes",
                          .max_tokens = 30,
                          .sampling = {.temperature = 3, .seed = 1}};
  const Json first = Run(options);
  EXPECT_EQ(Run(options)["tokens"], first["tokens"]);
  options.sampling.seed = 2;
  EXPECT_NE(Run(options)["tokens"], first["tokens"]);
  options.sampling = {};
  options.dtype = DType::kBF16;
  TinyModel tiny("gpt2", DType::kBF16);
  EXPECT_EQ(Run(options)["tokens"].get<std::vector<int32_t>>(),
            Continue({.prompt = Ids("Hello"), .max_tokens = 30}, tiny.generator.get(),
                     tiny.parameters.get())
                ->tokens);
}

TEST_F(GenerateTest, SaysWhatIsMissingAndWhatToDo) {
  EXPECT_THAT(Refused({.model = "/no/such", .prompt = "x"}),
              AllOf(HasSubstr("/no/such"), HasSubstr("Hugging Face")));
  EXPECT_THAT(Refused({.model = temp_.path(), .prompt = "x"}), HasSubstr(temp_.path()));
  const std::string folder = MakeFolder("gpt2");
  EXPECT_THAT(Refused({.model = folder, .prompt = "x"}), HasSubstr("--tokenizer"));
  EXPECT_THAT(Refused({.model = folder, .prompt = "", .tokenizer = "bytes"}), HasSubstr("empty"));
  EXPECT_THAT(Refused({.model = folder, .prompt = std::string(145, 'x'), .tokenizer = "bytes"}),
              AllOf(HasSubstr("145 tokens"), HasSubstr("144 positions")));
  EXPECT_THAT(Refused({.model = MakeCheckpoints("llama", "tokens"), .prompt = "x"}),
              HasSubstr("--tokenizer"));
  Write(folder + "/generation_config.json", R"({"eos_token_id": 9999})");
  EXPECT_THAT(Refused({.model = folder, .prompt = "x", .tokenizer = "bytes"}),
              AllOf(HasSubstr("eos_token_id is 9999"), HasSubstr("257")));
}

TEST_F(GenerateTest, ACorruptCheckpointIsRefused) {
  const std::string dir = MakeCheckpoints("llama", "bytes");
  const std::string path = dir + "/step-00000030/state-00000-of-00001.safetensors";
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-5, std::ios::end);
  file.put(0x7B);
  file.close();
  EXPECT_THAT(Refused({.model = dir, .prompt = "x"}), HasSubstr(path));
}

TEST_F(GenerateTest, OutputThatCannotBeWrittenIsAnError) {
  std::ofstream full("/dev/full");
  std::ostringstream err;
  EXPECT_EQ(
      Generate({.model = MakeFolder("gpt2"), .prompt = "x", .tokenizer = "bytes"}, &full, &err)
          .code(),
      absl::StatusCode::kAborted);
}

// The command line as `zeroshard generate` forwards it.
TEST_F(GenerateTest, TheProgramReadsItsOptionsAndSetsItsExitCode) {
  const auto run = [](std::vector<std::string> args, std::string* out) {
    args.insert(args.begin(), "generate");
    std::vector<char*> argv;
    for (std::string& arg : args) argv.push_back(arg.data());
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    const int code = GenerateMain(static_cast<int>(argv.size()), argv.data());
    *out = testing::internal::GetCapturedStdout();
    *out += testing::internal::GetCapturedStderr();
    return code;
  };
  const std::string model = "--model=" + MakeFolder("gpt2");
  std::string out;
  EXPECT_EQ(run({model, "--prompt=-x", "--tokenizer=bytes", "--max-tokens=4", "--temperature=2",
                 "--top-k=3", "--seed=5", "--threads=2", "--dtype=bf16", "--output", "json"},
                &out),
            kExitOk)
      << out;
  const Json json = Json::parse(out);
  const Json wanted = Run({.model = model.substr(8),
                           .prompt = "-x",
                           .tokenizer = "bytes",
                           .max_tokens = 4,
                           .sampling = {.temperature = 2, .top_k = 3, .seed = 5},
                           .dtype = DType::kBF16});
  EXPECT_EQ(json["tokens"], wanted["tokens"]);
  EXPECT_EQ(json["prompt"], "-x");
  EXPECT_EQ(run({model}, &out), kExitUsage);
  EXPECT_THAT(out, HasSubstr("--prompt"));
  EXPECT_EQ(run({"--model=/no/such", "--prompt=x"}, &out), kExitNotFound);
  EXPECT_EQ(run({model, "--prompt=x", "--tokenizer=bytes", "--temperature=-1"}, &out), kExitUsage);
  const std::pair<std::string, std::string> numbers[] = {{"--seed", "18446744073709551616"},
                                                         {"--seed", "1.5"},
                                                         {"--seed", "-1"},
                                                         {"--top-k", "99999999999999999999"},
                                                         {"--top-k", "9223372036854775808"},
                                                         {"--temperature", "inf"},
                                                         {"--temperature", "-1"},
                                                         {"--temperature", "nan"}};
  for (const auto& [option, value] : numbers) {
    EXPECT_EQ(run({model, "--prompt=x", "--tokenizer=bytes", option + "=" + value}, &out),
              kExitUsage);
    EXPECT_THAT(out, HasSubstr(option + ": seen " + value + ", wanted"));
    EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 1) << out;
  }
}

TEST(PrefixOfTest, IsWhatATemplatePutsBeforeASingleText) {
  const ByteTokens tokenizer;
  const auto prefix = [&](const char* json) { return *PrefixOf(json, tokenizer, "t.json"); };
  EXPECT_THAT(prefix("{}"), IsEmpty());
  EXPECT_THAT(prefix(R"({"post_processor": null})"), IsEmpty());
  EXPECT_THAT(prefix(R"({"post_processor": {"type": "ByteLevel"}})"), IsEmpty());
  EXPECT_THAT(prefix(R"({"post_processor": {"type": "TemplateProcessing", "single": [
      {"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}},
      {"SpecialToken": {"id": "<|endoftext|>"}}]}})"),
              ElementsAre(257));
  EXPECT_THAT(prefix(R"({"post_processor": {"type": "Sequence", "processors": [
      {"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": [
      {"SpecialToken": {"id": "<|endoftext|>"}}, {"SpecialToken": {"id": "<s>"}},
      {"Sequence": {"id": "A"}}]}]}})"),
              ElementsAre(256, 257));
  const auto missing = PrefixOf(R"({"post_processor": {"type": "TemplateProcessing", "single": [
      {"SpecialToken": {"id": "<nope>"}}]}})",
                                tokenizer, "t.json");
  EXPECT_THAT(std::string(missing.status().message()),
              AllOf(HasSubstr("t.json"), HasSubstr("<nope>")));
  for (const char* odd : {"[1]", "nonsense", "", "{\"post_processor\": 3"}) {
    EXPECT_EQ(PrefixOf(odd, tokenizer, "t.json").status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  for (const char* harmless :
       {R"({"post_processor": 3})", R"({"post_processor": {"type": "Sequence", "processors": 3}})",
        R"({"post_processor": {"type": "TemplateProcessing", "single": 3}})",
        R"({"post_processor": {"type": "TemplateProcessing", "single":
                                  [3, {"SpecialToken": 3}]}})"}) {
    EXPECT_THAT(prefix(harmless), IsEmpty());
  }
}

}  // namespace
}  // namespace zeroshard
