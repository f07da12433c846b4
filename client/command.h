// How a subcommand is declared.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/environment.h"
#include "client/jobs_client.h"

namespace zeroshard {

// The options that every subcommand has.
struct CommonOptions {
  std::string coordinator;
  std::string output = "text";  // text | json
  double timeout_seconds = 10;
  security::SecurityOptions security;

  bool json() const { return output == "json"; }
  absl::Duration timeout() const { return absl::Seconds(timeout_seconds); }
};

// Lives as long as the command line is parsed and run. A subcommand's callback sets `run`, which
// returns the exit code, or an error whose message is all that the user is told.
struct CommandContext {
  const Environment* env = nullptr;
  CommonOptions options;
  std::function<absl::StatusOr<int>()> run;
};

// To the coordinator that the options name. INVALID_ARGUMENT: no address, or certificates that are
// of no use.
// Calls wait as long as the options say, at most `timeout`.
absl::StatusOr<std::unique_ptr<JobsClient>> Connect(
    const CommandContext& context, absl::Duration timeout = absl::InfiniteDuration());

// A subcommand with the common options, which runs `run`. `remote`: it speaks to a coordinator that
// is already there.
CLI::App* AddCommand(CLI::App* app, CommandContext* context, const std::string& name,
                     const std::string& description, std::function<absl::StatusOr<int>()> run,
                     bool remote = true);

void AddJobCommands(CLI::App* app, CommandContext* context);         // submit, watch, cancel
void AddQueryCommands(CLI::App* app, CommandContext* context);       // list, status, nodes, version
void AddRecordCommands(CLI::App* app, CommandContext* context);      // history, logs
void AddValidateCommand(CLI::App* app, CommandContext* context);     // validate
void AddPlanCommand(CLI::App* app, CommandContext* context);         // plan
void AddCheckpointsCommand(CLI::App* app, CommandContext* context);  // checkpoints
void AddExportCommand(CLI::App* app, CommandContext* context);       // export
void AddLocalCommand(CLI::App* app, CommandContext* context);        // local
void AddGenerateCommand(CLI::App* app, CommandContext* context);     // generate
void AddTokenizeCommand(CLI::App* app, CommandContext* context);     // tokenize

}  // namespace zeroshard
