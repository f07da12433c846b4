#include "client/health_command.h"

#include <memory>
#include <string>

#include "client/render.h"
#include "common/exit_codes.h"
#include "common/health_client.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"

namespace zeroshard {
namespace {

struct Health {
  std::string address;
  std::string service;
};

absl::StatusOr<int> Check(const CommandContext& context, const Health& health) {
  ZS_ASSIGN_OR_RETURN(const bool serving,
                      CheckHealth(health.address, health.service, context.options.timeout()));
  const char* const status = serving ? "SERVING" : "NOT_SERVING";
  if (context.options.json()) {
    const nlohmann::ordered_json json = {
        {"address", health.address}, {"service", health.service}, {"status", status}};
    *context.env->out << JsonLine(json) << "\n";
  } else {
    *context.env->out << status << "\n";
  }
  return serving ? kExitOk : kExitFailed;
}

}  // namespace

void AddHealthCommand(CLI::App* app, CommandContext* context) {
  const auto health = std::make_shared<Health>();
  CLI::App* command = AddCommand(
      app, context, "health",
      "Asks a daemon's --health-listen port how it is. Exit codes: 0 it serves, 1 it does not, 2 "
      "wrong usage, 3 nobody answers, 5 it has no such service",
      [context, health] { return Check(*context, *health); }, /*remote=*/false);
  command->add_option("address", health->address, "Where it answers health checks")
      ->type_name("HOST:PORT")
      ->required();
  command
      ->add_option("--service", health->service,
                   "What to ask for. Nothing: whether the process is alive; ready: whether it is "
                   "registered with its coordinator (the coordinator: whether it serves) and not "
                   "about to leave")
      ->type_name("NAME");
}

}  // namespace zeroshard
