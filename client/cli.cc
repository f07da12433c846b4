#include "client/cli.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/command.h"
#include "client/console.h"
#include "client/health_command.h"
#include "common/exit_codes.h"
#include "common/security/options.h"
#include "common/spec/nearest_key.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

void AddCommonOptions(CLI::App* app, CommonOptions* options, bool remote) {
  if (remote) {
    app->add_option("--coordinator", options->coordinator,
                    "Where the coordinator listens (ZEROSHARD_COORDINATOR)")
        ->type_name("HOST:PORT")
        ->capture_default_str();
    security::AddSecurityOptions(app, &options->security, security::Role::kClient);
  }
  app->add_option("--output", options->output, "What is printed: text, or json for programs")
      ->check(CLI::IsMember({"text", "json"}))
      ->type_name("text|json")
      ->capture_default_str();
  app->add_option("--timeout", options->timeout_seconds,
                  "How long the coordinator may take to answer, in seconds")
      ->check(CLI::Range(0.1, 86400.0))
      ->type_name("SECONDS")
      ->capture_default_str();
}

std::string DescribeMisuse(const CLI::App& app, const std::vector<std::string>& args,
                           const CLI::ParseError& error) {
  std::vector<std::string> commands;
  for (const CLI::App* command : app.get_subcommands({})) commands.push_back(command->get_name());
  const auto named = std::find_first_of(args.begin(), args.end(), commands.begin(), commands.end());
  if (named != args.end()) {
    return absl::StrCat(error.what(), "; see zeroshard ", *named, " --help");
  }
  const std::string list = absl::StrJoin(commands, ", ");
  if (args.empty() || absl::StartsWith(args[0], "-")) {
    return absl::StrCat("which command? There are ", list, "; see zeroshard --help");
  }
  const std::string nearest = NearestKey(args[0], commands);
  return absl::StrCat("no command ", args[0],
                      nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?"),
                      nearest.empty() ? absl::StrCat("; there are ", list) : "");
}

}  // namespace

CLI::App* AddCommand(CLI::App* app, CommandContext* context, const std::string& name,
                     const std::string& description, std::function<absl::StatusOr<int>()> run,
                     bool remote) {
  CLI::App* command = app->add_subcommand(name, description);
  AddCommonOptions(command, &context->options, remote);
  command->callback([context, run = std::move(run)] { context->run = run; });
  return command;
}

absl::StatusOr<std::unique_ptr<JobsClient>> Connect(const CommandContext& context,
                                                    absl::Duration timeout) {
  ZS_ASSIGN_OR_RETURN(auto security,
                      security::Security::Load(context.options.security, security::Role::kClient));
  return JobsClient::Create(context.options.coordinator,
                            std::min(timeout, context.options.timeout()), std::move(security));
}

int RunClient(const std::vector<std::string>& args, const Environment& env) {
  CommandContext context;
  context.env = &env;
  context.options.coordinator = env.coordinator;

  CLI::App app("Trains language models on a cluster of ZeRO workers.", "zeroshard");
  app.require_subcommand(1);
  AddCommonOptions(&app, &context.options, /*remote=*/true);
  AddLocalCommand(&app, &context);
  AddJobCommands(&app, &context);
  AddQueryCommands(&app, &context);
  AddRecordCommands(&app, &context);
  AddCheckpointsCommand(&app, &context);
  AddExportCommand(&app, &context);
  AddValidateCommand(&app, &context);
  AddPlanCommand(&app, &context);
  AddGenerateCommand(&app, &context);
  AddTokenizeCommand(&app, &context);
  AddHealthCommand(&app, &context);
  try {
    // CLI11 takes the arguments last one first.
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
      app.exit(error, *env.out, *env.err);
      return kExitOk;
    }
    PrintError(env.err, DescribeMisuse(app, args, error));
    return kExitUsage;
  }

  absl::StatusOr<int> result = kExitFailed;
  try {
    result = context.run();
  } catch (const std::exception& error) {
    result = absl::InternalError(error.what());
  }
  env.out->flush();
  if (env.out->fail() && result.ok()) {
    result = absl::InternalError(
        "the output could not be written whole: is the disk full, or the reader gone?");
  }
  if (result.ok()) return *result;
  PrintError(env.err, result.status().message());
  return ExitCodeFor(result.status());
}

}  // namespace zeroshard
