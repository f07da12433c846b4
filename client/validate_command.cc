#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/command.h"
#include "client/console.h"
#include "client/job_file.h"
#include "client/mesh_view.h"
#include "client/render.h"
#include "common/exit_codes.h"
#include "common/plan/model_table.h"
#include "common/plan/offload.h"
#include "common/plan/planner.h"
#include "common/spec/job_spec.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

struct ValidateOptions {
  std::string file;
  std::vector<std::string> overrides;
};

// A comment on what the shard stores must hold and what travels; nothing for jobs without offload.
std::string DescribeOffload(const v1::JobSpec& spec, const std::vector<v1::ShardPlan>& plan,
                            const v1::StorePlan& stores) {
  if (!IsOffloaded(spec)) return "";
  uint64_t push = 0, pull = 0;
  for (const v1::ShardPlan& rank : plan) {
    push = std::max(push, rank.push_bytes_per_step());
    pull = std::max(pull, rank.pull_bytes_per_step());
  }
  return absl::StrCat("# the shard stores hold ", FormatStorePlan(stores),
                      "; a rank sends at most ", FormatBytes(push), " to them and gets ",
                      FormatBytes(pull), " from them in a step\n");
}

std::string MeshComment(const v1::JobSpec& spec) {
  const std::string mesh = DescribeMesh(spec);
  return mesh.empty() ? "" : absl::StrCat("# mesh: ", mesh, "\n");
}

absl::StatusOr<int> Validate(const CommandContext& context, const ValidateOptions& options) {
  ZS_ASSIGN_OR_RETURN(
      const LoadedJob job,
      LoadJobFile(options.file,
                  {.overrides = options.overrides, .checkpoint_base = {}, .resume_from = {}}));
  const v1::JobSpec& spec = job.spec;
  for (const std::string& warning : job.warnings) {
    PrintError(context.env->err, absl::StrCat("note, ", warning));
  }
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(spec.model()));
  ZS_ASSIGN_OR_RETURN(const std::vector<v1::ShardPlan> plan, PlanShards(spec));
  ZS_ASSIGN_OR_RETURN(const v1::StorePlan stores, PlanStore(spec));
  const uint64_t steps_tokens = spec.train_batch_size() * spec.model().sequence_length();
  if (context.options.json()) {
    nlohmann::ordered_json json = {{"parameters", model.ParameterCount()},
                                   {"micro_batches_per_step", MicroBatchesPerStep(spec)},
                                   {"tokens_per_step", steps_tokens},
                                   {"plan", nlohmann::ordered_json::array()},
                                   {"spec", ToJson(spec)}};
    for (const v1::ShardPlan& rank : plan) json["plan"].push_back(ToJson(rank));
    if (IsOffloaded(spec)) json["store_plan"] = ToJson(stores);
    *context.env->out << JsonLine(json) << "\n";
  } else {
    *context.env->out << "# valid: " << FormatCount(static_cast<double>(model.ParameterCount()))
                      << " parameters, " << MicroBatchesPerStep(spec) << " micro-batches and "
                      << FormatCount(static_cast<double>(steps_tokens)) << " tokens a step\n"
                      << MeshComment(spec) << DescribeOffload(spec, plan, stores)
                      << FormatJobSpec(spec);
  }
  // The workers may run where the data is.
  if (absl::Status status = CheckFilesHere(spec); !status.ok()) {
    PrintError(context.env->err, absl::StrCat("note, on this machine ", status.message()));
  }
  return kExitOk;
}

}  // namespace

void AddValidateCommand(CLI::App* app, CommandContext* context) {
  const auto options = std::make_shared<ValidateOptions>();
  CLI::App* validate = AddCommand(
      app, context, "validate", "Checks a specification and prints it complete",
      [context, options] { return Validate(*context, *options); }, /*remote=*/false);
  validate
      ->add_option("job", options->file, "The specification, YAML or JSON; - reads standard input")
      ->type_name("JOB.yaml")
      ->required();
  validate->add_option("--set", options->overrides, "Overrides a key: --set steps=20")
      ->type_name("KEY.PATH=VALUE")
      ->allow_extra_args(false);
}

}  // namespace zeroshard
