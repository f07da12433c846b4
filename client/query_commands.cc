#include <algorithm>
#include <memory>
#include <string>

#include "client/command.h"
#include "client/console.h"
#include "client/jobs_client.h"
#include "client/render.h"
#include "common/exit_codes.h"
#include "common/status_macros.h"
#include "common/version.h"

namespace zeroshard {
namespace {

void Print(const CommandContext& context, const google::protobuf::Message& message,
           const std::string& text) {
  *context.env->out << (context.options.json() ? JsonLine(ToJson(message)) + "\n" : text);
}

absl::StatusOr<int> List(const CommandContext& context) {
  ZS_ASSIGN_OR_RETURN(const auto client, Connect(context));
  ZS_ASSIGN_OR_RETURN(const v1::ListResponse jobs, client->List());
  Print(context, jobs, FormatJobs(jobs));
  return kExitOk;
}

absl::StatusOr<int> Status(const CommandContext& context, const std::string& job) {
  ZS_ASSIGN_OR_RETURN(const auto client, Connect(context));
  ZS_ASSIGN_OR_RETURN(const v1::JobStatus status, client->Get(job));
  Print(context, status, FormatStatus(status));
  return kExitOk;
}

absl::StatusOr<int> Nodes(const CommandContext& context) {
  ZS_ASSIGN_OR_RETURN(const auto client, Connect(context));
  ZS_ASSIGN_OR_RETURN(const v1::NodesResponse nodes, client->Nodes());
  Print(context, nodes, FormatNodes(nodes));
  return kExitOk;
}

// A coordinator that is not there is no error here: the client's own version is the answer.
absl::StatusOr<int> Version(const CommandContext& context) {
  constexpr absl::Duration kLongest = absl::Seconds(2);
  ZS_ASSIGN_OR_RETURN(const auto client, Connect(context, kLongest));
  const absl::StatusOr<v1::VersionResponse> remote = client->Version();
  if (context.options.json()) {
    nlohmann::ordered_json json = {{"version", kVersion}, {"coordinator", nullptr}};
    if (remote.ok()) json["coordinator"] = ToJson(*remote);
    *context.env->out << JsonLine(json) << "\n";
    return kExitOk;
  }
  *context.env->out << "zeroshard " << kVersion << "\n";
  if (remote.ok()) {
    *context.env->out << "coordinator at " << client->address() << ": "
                      << Shown(remote->version(), kMostCell) << "\n";
  }
  return kExitOk;
}

}  // namespace

void AddQueryCommands(CLI::App* app, CommandContext* context) {
  AddCommand(app, context, "list", "Lists the jobs, oldest first",
             [context] { return List(*context); });
  const auto job = std::make_shared<std::string>();
  AddCommand(app, context, "status", "Shows one job: state, ranks, plan and what happened",
             [context, job] { return Status(*context, *job); })
      ->add_option("job", *job, "Name or run id")
      ->required();
  AddCommand(app, context, "nodes", "Lists workers and shard stores",
             [context] { return Nodes(*context); });
  AddCommand(app, context, "version", "Prints the version, and the coordinator's if it answers",
             [context] { return Version(*context); });
}

}  // namespace zeroshard
