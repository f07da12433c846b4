// `zeroshard generate` becomes `zeroshard-worker generate`: the client has no model code.
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/command.h"
#include "common/files.h"
#include "common/option_checks.h"
#include "common/signals.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

constexpr char kProgram[] = "zeroshard-worker";

// An option as the worker's program has it; only what was given is passed on.
struct Forwarded {
  std::string name, value;
  CLI::Option* option = nullptr;
};

struct GenerateCommand {
  std::string bin_dir;
  std::list<Forwarded> forwarded;
};

// Beside this program, or in a build folder where CMake builds it.
absl::StatusOr<std::string> FindWorker(const std::string& bin_dir, const std::string& program) {
  const fs::path home = fs::path(program).parent_path();
  std::vector<fs::path> folders = {home, home / "worker", home.parent_path() / "worker"};
  if (!bin_dir.empty()) folders = {bin_dir, fs::path(bin_dir) / "worker"};
  std::vector<std::string> names;
  for (const fs::path& folder : folders) {
    names.push_back(folder.lexically_normal().string());
    const std::string path = absl::StrCat(names.back(), "/", kProgram);
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  return absl::NotFoundError(absl::StrCat("the program ", kProgram, " is not in ",
                                          absl::StrJoin(names, ", "),
                                          "; build it, or say where it is with --bin-dir DIR"));
}

// Returns only where it could not.
absl::StatusOr<int> BecomeWorker(const CommandContext& context, const GenerateCommand& command) {
  ZS_ASSIGN_OR_RETURN(const std::string program, FindWorker(command.bin_dir, context.env->program));
  std::vector<std::string> args = {program, "generate", "--output", context.options.output};
  for (const Forwarded& each : command.forwarded) {
    if (each.option->count() == 0) continue;
    if (each.value.empty()) {
      args.insert(args.end(), {each.name, ""});
    } else {
      // Joined, so that a prompt may begin with a dash.
      args.push_back(absl::StrCat(each.name, "=", each.value));
    }
  }
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  context.env->out->flush();
  RestoreSignalMask();
  execv(program.c_str(), argv.data());
  return ErrnoError(errno, "cannot run", program);
}

}  // namespace

void AddGenerateCommand(CLI::App* app, CommandContext* context) {
  const auto command = std::make_shared<GenerateCommand>();
  CLI::App* generate = AddCommand(
      app, context, "generate",
      "Continues a text with a model on this machine: a Hugging Face folder, or a checkpoint",
      [context, command] { return BecomeWorker(*context, *command); }, /*remote=*/false);
  const auto add = [&](const std::string& name, const char* type, const char* description) {
    Forwarded& each = command->forwarded.emplace_back();
    each.name = name;
    each.option = generate->add_option(name, each.value, description)->type_name(type);
    return each.option;
  };
  add("--model", "DIR", "A Hugging Face folder, a checkpoint, or a folder of checkpoints")
      ->required();
  add("--prompt", "TEXT", "The text to continue")->required();
  add("--tokenizer", "NAME",
      "bytes, a tokenizer.json or its folder, where the model has none of its own");
  add("--max-tokens", "N", "How many tokens at most [128]")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  add("--temperature", "X",
      "0: always the likeliest token; 1: as the model says; more: more surprising [0]")
      ->check(NotNegativeProblem);
  add("--top-k", "K", "Draws among the K likeliest tokens only; 0: among all [0]")
      ->check([](const std::string& text) { return WholeNumberProblem(text, INT64_MAX); });
  add("--seed", "S", "The same seed draws the same text [0]")->check([](const std::string& text) {
    return WholeNumberProblem(text, UINT64_MAX);
  });
  add("--threads", "N", "Threads for computing; else all cores")->check(CLI::Range(1, 1024));
  add("--dtype", "fp32|bf16|fp16", "The type of weights and activations [fp32]")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  generate
      ->add_option("--bin-dir", command->bin_dir,
                   "Where zeroshard-worker is, if not beside this program")
      ->type_name("DIR");
}

}  // namespace zeroshard
