#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/command.h"
#include "client/console.h"
#include "client/job_file.h"
#include "client/jobs_client.h"
#include "client/mesh_view.h"
#include "client/render.h"
#include "client/resume.h"
#include "client/watch.h"
#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

// A coordinator that restarts is away for longer than it may take over one answer.
constexpr absl::Duration kPatience = absl::Seconds(60);

absl::StatusOr<int> WatchToEnd(const CommandContext& context, JobsClient* client,
                               const std::string& job) {
  Console console(*context.env);
  JobView view(&console, &SystemClock::Get(), context.options.json());
  StopToken stop;
  // Whether there is such a coordinator and such a job is told at once; only then is there
  // patience.
  ZS_RETURN_IF_ERROR(client->Get(job).status());
  ZS_ASSIGN_OR_RETURN(const v1::JobStatus status,
                      FollowJob(client, job, std::max(kPatience, context.options.timeout()),
                                &SystemClock::Get(), &stop, view.Sink()));
  return view.Finish(status, context.env->err);
}

struct SubmitOptions {
  std::string file;
  std::vector<std::string> overrides;
  ResumeOptions resume;
  bool wait = false;
  bool force = false;
};

absl::StatusOr<int> Submit(const CommandContext& context, const SubmitOptions& options) {
  ZS_ASSIGN_OR_RETURN(const LoadedJob job,
                      LoadJobFile(options.file, {.overrides = options.overrides,
                                                 .checkpoint_base = {},
                                                 .resume_from = options.resume.from}));
  for (const std::string& warning : job.warnings) {
    PrintError(context.env->err, absl::StrCat("note, ", warning));
  }
  ZS_ASSIGN_OR_RETURN(v1::SubmitRequest request, MakeRequest(job.spec, options.resume));
  request.set_force(options.force);
  ZS_ASSIGN_OR_RETURN(const auto client, Connect(context));
  ZS_ASSIGN_OR_RETURN(const v1::SubmitResponse response, client->Submit(request));
  if (context.options.json()) {
    *context.env->out << JsonLine(ToJson(response)) << std::endl;
  } else {
    const v1::JobStatus& status = response.status();
    *context.env->out << Shown(response.run_id(), kMostCell) << " submitted, "
                      << NameOf(status.state()) << (status.reason().empty() ? "" : ": ")
                      << Shown(status.reason()) << std::endl;
    if (const std::string mesh = DescribeMesh(job.spec); !mesh.empty())
      *context.env->out << "mesh: " << mesh << std::endl;
  }
  if (!options.wait) return kExitOk;
  return WatchToEnd(context, client.get(), response.run_id());
}

absl::StatusOr<int> Watch(const CommandContext& context, const std::string& job) {
  ZS_ASSIGN_OR_RETURN(const auto client, Connect(context));
  return WatchToEnd(context, client.get(), job);
}

struct CancelOptions {
  std::string job;
  bool save = false;
};

absl::StatusOr<int> Cancel(const CommandContext& context, const CancelOptions& options) {
  ZS_ASSIGN_OR_RETURN(const auto client, Connect(context));
  ZS_ASSIGN_OR_RETURN(const v1::JobStatus status, client->Cancel(options.job, options.save));
  *context.env->out << (context.options.json() ? JsonLine(ToJson(status)) : FormatState(status))
                    << "\n";
  return kExitOk;
}

}  // namespace

void AddJobCommands(CLI::App* app, CommandContext* context) {
  const auto submit_options = std::make_shared<SubmitOptions>();
  CLI::App* submit =
      AddCommand(app, context, "submit", "Hands a job to the coordinator",
                 [context, submit_options] { return Submit(*context, *submit_options); });
  submit
      ->add_option("job", submit_options->file,
                   "The specification, YAML or JSON; - reads it from standard input")
      ->type_name("JOB.yaml")
      ->required();
  submit
      ->add_option("--set", submit_options->overrides,
                   "Overrides a key: --set steps=20 --set optimizer.params.lr=1e-3")
      ->type_name("KEY.PATH=VALUE")
      ->allow_extra_args(false);
  AddResumeOptions(submit, &submit_options->resume);
  submit->add_flag("--force", submit_options->force,
                   "Queues the job although no workers or stores that are there could hold it, "
                   "because there will be others");
  submit->add_flag("--wait", submit_options->wait,
                   "Watches the job to its end; exit code 0 only if it completed");

  const auto watch_job = std::make_shared<std::string>();
  AddCommand(app, context, "watch",
             "Shows a job's progress to its end; exit code 0 only if it completed",
             [context, watch_job] { return Watch(*context, *watch_job); })
      ->add_option("job", *watch_job, "Name or run id")
      ->required();

  const auto cancel_options = std::make_shared<CancelOptions>();
  CLI::App* cancel =
      AddCommand(app, context, "cancel", "Ends a job early",
                 [context, cancel_options] { return Cancel(*context, *cancel_options); });
  cancel->add_option("job", cancel_options->job, "Name or run id")->required();
  cancel->add_flag("--save", cancel_options->save,
                   "Lets it finish its step and write a checkpoint first; answers at once, the job "
                   "ends when the checkpoint is complete");
}

}  // namespace zeroshard
