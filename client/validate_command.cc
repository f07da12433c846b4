#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/command.h"
#include "client/console.h"
#include "client/job_file.h"
#include "client/render.h"
#include "common/exit_codes.h"
#include "common/plan/model_table.h"
#include "common/spec/job_spec.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

struct ValidateOptions {
  std::string file;
  std::vector<std::string> overrides;
};

absl::StatusOr<int> Validate(const CommandContext& context, const ValidateOptions& options) {
  ZS_ASSIGN_OR_RETURN(
      const LoadedJob job,
      LoadJobFile(options.file,
                  {.overrides = options.overrides, .checkpoint_base = {}, .resume_from = {}}));
  const v1::JobSpec& spec = job.spec;
  for (const std::string& warning : job.warnings) {
    *context.env->err << "zeroshard: note, " << warning << "\n";
  }
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(spec.model()));
  const uint64_t steps_tokens = spec.train_batch_size() * spec.model().sequence_length();
  if (context.options.json()) {
    const nlohmann::ordered_json json = {{"parameters", model.ParameterCount()},
                                         {"micro_batches_per_step", MicroBatchesPerStep(spec)},
                                         {"tokens_per_step", steps_tokens},
                                         {"spec", ToJson(spec)}};
    *context.env->out << json.dump() << "\n";
  } else {
    *context.env->out << "# valid: " << FormatCount(static_cast<double>(model.ParameterCount()))
                      << " parameters, " << MicroBatchesPerStep(spec) << " micro-batches and "
                      << FormatCount(static_cast<double>(steps_tokens)) << " tokens a step\n"
                      << FormatJobSpec(spec);
  }
  // The workers may run where the data is.
  if (absl::Status status = CheckFilesHere(spec); !status.ok()) {
    *context.env->err << "zeroshard: note, on this machine " << status.message() << "\n";
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
