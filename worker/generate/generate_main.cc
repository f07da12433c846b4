#include "worker/generate/generate_main.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/exit_codes.h"
#include "common/option_checks.h"
#include "common/status_macros.h"
#include "common/text/shown.h"
#include "worker/device/device.h"
#include "worker/generate/continuation.h"
#include "worker/generate/memory_parameters.h"
#include "worker/generate/model_files.h"
#include "worker/generate/text_stream.h"

namespace zeroshard {
namespace {

constexpr char kProgram[] = "zeroshard generate";

const char* Described(StopReason reason) {
  switch (reason) {
    case StopReason::kEndOfText:
      return "ended by the end-of-text token";
    case StopReason::kMaxTokens:
      return "ended by --max-tokens";
    case StopReason::kPositions:
      return "ended at the model's last position";
  }
  return "?";
}

// Of a model or a file that somebody else made.
std::string Shortened(absl::string_view text) { return Shown(text, kMostMessage, Layout::kKept); }

absl::Status Write(const std::string& text, std::ostream* out) {
  *out << text << std::flush;
  if (out->good()) return absl::OkStatus();
  return absl::AbortedError(
      "the output could not be written: is the disk full, or the reader gone?");
}

}  // namespace

absl::Status Generate(const GenerateOptions& options, std::ostream* out, std::ostream* err) {
  ZS_RETURN_IF_ERROR(CheckSampling(options.sampling));
  ZS_ASSIGN_OR_RETURN(ModelFiles files, OpenModelFiles(options.model, options.tokenizer));
  for (const std::string& warning : files.warnings) {
    *err << kProgram << ": warning: " << Shortened(warning) << std::endl;
  }
  ZS_ASSIGN_OR_RETURN(
      ContinuationOptions prompt,
      MakePrompt("--prompt", options.prompt, *files.tokenizer, files.ends, files.table.config));
  prompt.max_tokens = options.max_tokens;
  prompt.sampling = options.sampling;
  const std::unique_ptr<Device> device = MakeCpuDevice();
  const std::unique_ptr<Ops> ops = MakeCpuOps(options.threads);
  ZS_ASSIGN_OR_RETURN(const auto parameters, MemoryParameters::Load(files.table, *files.weights,
                                                                    device.get(), options.dtype));
  const Model model = MakeModel(files.table, /*checkpointing=*/false);
  ZS_ASSIGN_OR_RETURN(const auto generator,
                      Generator::Create(&model, device.get(), ops.get(), options.dtype,
                                        std::min(PositionsWanted(prompt),
                                                 Generator::Positions(files.table.config))));

  TextStream stream(files.tokenizer.get());
  std::string text;
  // Byte for byte but on a terminal, which a model's text might command.
  const auto say = [&](const std::string& more) {
    return Write(options.terminal ? Shown(more, SIZE_MAX, Layout::kKept) : more, out);
  };
  const auto add = [&](const std::string& more) {
    text += more;
    return options.json ? absl::OkStatus() : say(more);
  };
  if (!options.json) ZS_RETURN_IF_ERROR(say(options.prompt));
  const auto start = std::chrono::steady_clock::now();
  ZS_ASSIGN_OR_RETURN(
      const Continuation answer,
      Continue(prompt, generator.get(), parameters.get(), [&](int32_t token) -> absl::Status {
        ZS_ASSIGN_OR_RETURN(const std::string more, stream.Add(token));
        return add(more);
      }));
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ZS_RETURN_IF_ERROR(add(stream.Finish()));
  if (options.json) {
    const nlohmann::ordered_json result = {{"model", files.path},
                                           {"prompt", options.prompt},
                                           {"text", text},
                                           {"prompt_tokens", prompt.prompt},
                                           {"tokens", answer.tokens},
                                           {"stop", NameOf(answer.reason)},
                                           {"seconds", seconds}};
    // A prompt from the command line may be any bytes.
    return Write(result.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) + "\n", out);
  }
  ZS_RETURN_IF_ERROR(Write("\n", out));
  *err << absl::StrFormat("%s: %d tokens after %d in %.2f s, %s", kProgram, answer.tokens.size(),
                          prompt.prompt.size(), seconds, Described(answer.reason))
       << std::endl;
  return absl::OkStatus();
}

int GenerateMain(int argc, char** argv) {
  GenerateOptions options;
  options.threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  std::string dtype = NameOf(options.dtype), output = "text";
  CLI::App app("Continues a text with a model: a Hugging Face folder, or a checkpoint.",
               "zeroshard-worker generate");
  app.add_option("--model", options.model,
                 "A Hugging Face folder, a checkpoint, or a folder of checkpoints (the newest)")
      ->type_name("DIR")
      ->required();
  app.add_option("--prompt", options.prompt, "The text to continue")->required();
  app.add_option("--tokenizer", options.tokenizer,
                 "bytes, a tokenizer.json or its folder, where the model has none of its own")
      ->type_name("NAME");
  app.add_option("--max-tokens", options.max_tokens, "How many tokens at most")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  app.add_option("--temperature", options.sampling.temperature,
                 "0: always the likeliest token; 1: as the model says; more: more surprising")
      ->check(NotNegativeProblem)
      ->capture_default_str();
  app.add_option("--top-k", options.sampling.top_k,
                 "Draws among the k likeliest tokens only; 0: among all")
      ->check([](const std::string& text) { return WholeNumberProblem(text, INT64_MAX); })
      ->capture_default_str();
  app.add_option("--seed", options.sampling.seed, "The same seed draws the same text")
      ->check([](const std::string& text) { return WholeNumberProblem(text, UINT64_MAX); })
      ->capture_default_str();
  app.add_option("--threads", options.threads, "Threads for computing")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--dtype", dtype, "The type of weights and activations")
      ->check(CLI::IsMember({NameOf(DType::kF32), NameOf(DType::kBF16), NameOf(DType::kF16)}))
      ->capture_default_str();
  app.add_option("--output", output, "What is printed: text, or json for programs")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    std::cerr << kProgram << ": " << Shortened(error.what()) << "; see --help" << std::endl;
    return kExitUsage;
  }
  for (const DType type : {DType::kBF16, DType::kF16}) {
    if (dtype == NameOf(type)) options.dtype = type;
  }
  options.json = output == "json";
  options.terminal = isatty(STDOUT_FILENO) == 1;
  absl::Status status;
  try {
    status = Generate(options, &std::cout, &std::cerr);
  } catch (const std::exception& error) {
    status = absl::InternalError(error.what());
  }
  if (status.ok()) return kExitOk;
  std::cerr << kProgram << ": " << Shortened(status.message()) << std::endl;
  return ExitCodeFor(status);
}

}  // namespace zeroshard
