#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/command.h"
#include "client/console.h"
#include "client/job_file.h"
#include "client/plan_report.h"
#include "client/quantity.h"
#include "client/render.h"
#include "common/exit_codes.h"
#include "common/plan/model_shape.h"
#include "common/plan/nvme_bytes.h"
#include "common/plan/offload.h"
#include "common/spec/job_spec.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

struct PlanOptions {
  std::string file;
  std::vector<std::string> overrides;
  std::string parameters;
  int64_t sequence = 1024, vocab = 50257, micro_batch = 1, accumulation = 1;
  int64_t batch = 0;  // sequences of a step; 0: accumulation says
  int replicas = 1;
  std::string type = "bf16";

  int gpus = 0;  // 0: as many as the job has workers, or 8
  int gpus_per_host = 8;
  std::string gpu_memory = "80GB", host_memory = "1TB", nvme = "0";
  std::string network = "400Gbit", gpu_link = "450GB", host_link = "50GB";
  std::string host_speed = "200GB", nvme_speed = "10GB", peak = "989T";
  double peak_share = 0.4, link_share = 0.8;
  bool meshes = true, search = false;
};

template <typename T>
absl::Status Into(const char* option, absl::StatusOr<T> parsed, T* out) {
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(option, ": ", parsed.status().message()));
  }
  *out = *parsed;
  return absl::OkStatus();
}

absl::StatusOr<ClusterSize> ClusterOf(const PlanOptions& o) {
  ClusterSize c;
  c.devices_per_host = o.gpus_per_host;
  ZS_RETURN_IF_ERROR(Into("--gpu-memory", ParseBytes(o.gpu_memory), &c.device_memory));
  ZS_RETURN_IF_ERROR(Into("--host-memory", ParseBytes(o.host_memory), &c.host_memory));
  ZS_RETURN_IF_ERROR(Into("--nvme", ParseBytes(o.nvme), &c.nvme));
  ZS_RETURN_IF_ERROR(Into("--network", ParseSpeed(o.network), &c.network));
  ZS_RETURN_IF_ERROR(Into("--gpu-link", ParseSpeed(o.gpu_link), &c.device_link));
  ZS_RETURN_IF_ERROR(Into("--host-link", ParseSpeed(o.host_link), &c.host_link));
  ZS_RETURN_IF_ERROR(Into("--host-memory-speed", ParseSpeed(o.host_speed), &c.memory_speed));
  ZS_RETURN_IF_ERROR(Into("--nvme-speed", ParseSpeed(o.nvme_speed), &c.nvme_speed));
  ZS_RETURN_IF_ERROR(Into("--peak", ParseCount(o.peak), &c.peak));
  constexpr uint64_t kLeastMemory = 1'000'000;  // less is a size whose unit was forgotten
  if (c.device_memory < kLeastMemory) {
    return absl::InvalidArgumentError(
        absl::StrCat("--gpu-memory: seen ", o.gpu_memory, ", wanted at least 1MB"));
  }
  c.peak_share = o.peak_share;
  c.link_share = o.link_share;
  const std::pair<const char*, double> rates[] = {
      {"--network", c.network},       {"--gpu-link", c.device_link},
      {"--host-link", c.host_link},   {"--host-memory-speed", c.memory_speed},
      {"--nvme-speed", c.nvme_speed}, {"--peak", c.peak}};
  for (const auto& [option, rate] : rates) {
    if (!(rate >= 1))
      return absl::InvalidArgumentError(
          absl::StrCat(option, ": seen ", rate, " a second, wanted at least 1"));
  }
  for (const auto& [option, share] :
       {std::pair("--peak-share", c.peak_share), std::pair("--link-share", c.link_share)}) {
    if (!(share > 0))  // nor NaN
      return absl::InvalidArgumentError(
          absl::StrCat(option, ": seen ", share, ", wanted more than 0, at most 1"));
  }
  return c;
}

std::string ModelInWords(const ModelTable& model, const std::string& name) {
  const ModelConfig& c = model.config;
  return absl::StrCat(name, ": ", FormatCount(static_cast<double>(model.ParameterCount())),
                      " parameters, hidden ", c.hidden, ", ", c.layers, " layers, ", c.heads,
                      " heads, sequence ", c.sequence, ", vocabulary ", c.vocab);
}

absl::Status FromParameters(const PlanOptions& o, PlanReport* report) {
  ZS_RETURN_IF_ERROR(Into("--parameters", ParseCount(o.parameters), &report->asked_parameters));
  const absl::StatusOr<v1::ModelSpec> shape =
      ShapeOf(report->asked_parameters, {.sequence = o.sequence, .vocab = o.vocab});
  if (!shape.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--parameters: ", shape.status().message()));
  }
  Workload& w = report->workload;
  ZS_ASSIGN_OR_RETURN(w.model, MakeModelTable(*shape));
  w.options.micro_batch = o.micro_batch;
  w.options.dtype = o.type == "fp32" ? DType::kF32 : o.type == "fp16" ? DType::kF16 : DType::kBF16;
  w.options.replicas = o.replicas;
  w.accumulation = o.accumulation;
  if (o.batch % o.micro_batch != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--batch: seen ", o.batch,
                                                   " sequences, wanted a multiple of the ",
                                                   o.micro_batch, " of --micro-batch"));
  }
  w.micro_batches = o.batch / o.micro_batch;
  w.fetch_one_ahead = true;
  report->model = ModelInWords(w.model, absl::StrCat("a GPT-2 of about ", o.parameters));
  report->cluster.devices = o.gpus > 0 ? o.gpus : 8;
  return absl::OkStatus();
}

absl::Status FromJob(const CommandContext& context, const PlanOptions& o, PlanReport* report) {
  ZS_ASSIGN_OR_RETURN(
      const LoadedJob job,
      LoadJobFile(o.file, {.overrides = o.overrides, .checkpoint_base = {}, .resume_from = {}}));
  for (const std::string& warning : job.warnings) {
    PrintError(context.env->err, absl::StrCat("note, ", warning));
  }
  const v1::JobSpec& spec = job.spec;
  const int workers = static_cast<int>(spec.resources().workers());
  Workload& w = report->workload;
  ZS_ASSIGN_OR_RETURN(w.model, MakeModelTable(spec.model()));
  w.options = MakeZeroOptions(spec, workers);
  w.options.replicas = static_cast<int>(std::max<uint32_t>(1, spec.store().replicas()));
  w.micro_batches = static_cast<int64_t>(MicroBatchesPerStep(spec));
  w.momentum_only = UsesSgd(spec);
  w.saves = !spec.checkpoint().dir().empty();
  ZS_ASSIGN_OR_RETURN(report->ranks, PlanShards(spec));
  report->model = ModelInWords(w.model, spec.name());
  report->cluster.devices = o.gpus > 0 ? o.gpus : workers;
  Configuration c;
  c.stage = w.options.stage;
  c.offload = !IsOffloaded(spec) ? OffloadTo::kNone
              : UsesNvme(spec)   ? OffloadTo::kNvme
                                 : OffloadTo::kCpu;
  c.offload_param = OffloadsParameters(spec);
  c.checkpointing = w.options.checkpointing;
  const MeshCut cut = CutOf(spec);
  c.tensor = cut.tensor;
  c.pipeline = cut.pipeline;
  c.virtual_stages = cut.virtual_stages;
  c.sequence_parallel = cut.sequence_parallel;
  c.full_gradients = w.options.full_gradients;
  c.data = workers / cut.Ranks();
  report->job = Evaluate(w, report->cluster, c);
  return absl::OkStatus();
}

absl::StatusOr<int> Plan(const CommandContext& context, const PlanOptions& options) {
  if (options.file.empty() && options.parameters.empty()) {
    return absl::InvalidArgumentError(
        "what is to be planned? Wanted a job file or --parameters 7.5B");
  }
  PlanReport report;
  ZS_ASSIGN_OR_RETURN(report.cluster, ClusterOf(options));
  ZS_RETURN_IF_ERROR(options.file.empty() ? FromParameters(options, &report)
                                          : FromJob(context, options, &report));
  if (options.search) {
    FillSearch(&report);
  } else {
    FillReport(options.meshes, &report);
  }
  if (context.options.json()) {
    *context.env->out << JsonLine(ToJson(report)) << "\n";
  } else {
    *context.env->out << FormatReport(report);
  }
  return report.Fits() ? kExitOk : kExitDoesNotFit;
}

// What says something of the one kind of model is refused with the other, which would ignore it.
void AddModelOptions(CLI::App* plan, PlanOptions* o) {
  CLI::Option* const job =
      plan->add_option("job", o->file,
                       "Plans this job, byte for byte, and alternatives with its batch; - reads "
                       "standard input")
          ->type_name("JOB.yaml");
  CLI::Option* const parameters =
      plan->add_option("--parameters", o->parameters,
                       "Instead of a job: a GPT-2 of about so many, 10M to 20T. Heads of 128, "
                       "hidden a multiple of 128 (from 4096 on of 1024) nearest to 128 x layers")
          ->type_name("COUNT")
          ->excludes(job);
  plan->add_option("--set", o->overrides, "Overrides a key of the job: --set resources.workers=16")
      ->type_name("KEY.PATH=VALUE")
      ->allow_extra_args(false)
      ->needs(job);
  const auto number = [&](const char* name, auto* value, const char* help, int most) {
    plan->add_option(name, *value, help)
        ->check(CLI::Range(1, most))
        ->capture_default_str()
        ->needs(parameters);
  };
  number("--sequence", &o->sequence, "Tokens of a sequence, with --parameters", 1 << 20);
  number("--vocab", &o->vocab, "Its vocabulary, with --parameters", 1 << 24);
  number("--micro-batch", &o->micro_batch, "Sequences at once, with --parameters", 1 << 20);
  number("--accumulation", &o->accumulation,
         "Micro-batches of a rank and step, with --parameters; a pipeline has at least as many as "
         "stages",
         1 << 20);
  plan->add_option("--batch", o->batch,
                   "Sequences of a step over all ranks, with --parameters: every mesh is compared "
                   "at the same batch")
      ->check(CLI::Range(1, 1 << 24))
      ->needs(parameters)
      ->excludes("--accumulation");
  number("--replicas", &o->replicas, "Copies in the shard stores, with --parameters", 16);
  plan->add_option("--type", o->type, "What it computes in, with --parameters")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}))
      ->capture_default_str()
      ->needs(parameters);
}

void AddClusterOptions(CLI::App* plan, PlanOptions* o) {
  plan->add_option("--gpus", o->gpus,
                   "Devices in all; the smallest configuration is looked for on at most as many. "
                   "Default: the job's workers, or 8")
      ->check(CLI::Range(1, 65536));
  plan->add_option("--gpus-per-host", o->gpus_per_host, "Devices of a host")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  const auto text = [plan](const char* name, std::string* value, const char* kind,
                           const char* help) {
    plan->add_option(name, *value, help)->type_name(kind)->capture_default_str();
  };
  text("--gpu-memory", &o->gpu_memory, "SIZE", "Memory of a device: 80GB, 80GiB");
  text("--host-memory", &o->host_memory, "SIZE", "Memory of each host for shard stores; 0: none");
  text("--nvme", &o->nvme, "SIZE", "NVMe of each host for shard stores; 0: none");
  text("--network", &o->network, "SPEED", "Of a host, all its devices together: 400Gbit, 50GB");
  text("--gpu-link", &o->gpu_link, "SPEED", "Of a device to the others of its host");
  text("--host-link", &o->host_link, "SPEED", "Of a device to its host's memory");
  text("--host-memory-speed", &o->host_speed, "SPEED", "Of a host's memory, in the stores' update");
  text("--nvme-speed", &o->nvme_speed, "SPEED", "Of a host's disks, in the stores' update");
  text("--peak", &o->peak, "COUNT", "Operations a second of a device in that type: 989T");
  plan->add_option("--peak-share", o->peak_share, "Of the peak that is reached")
      ->check(CLI::Range(0.001, 1.0))
      ->capture_default_str();
  plan->add_option("--link-share", o->link_share, "Of every link's speed that is reached")
      ->check(CLI::Range(0.001, 1.0))
      ->capture_default_str();
  CLI::Option* const no_meshes =
      plan->add_flag("!--no-meshes", o->meshes, "Data parallelism alone");
  plan->add_flag("--search", o->search,
                 "Instead: every mesh tensor x pipeline x data of exactly these devices (tensor "
                 "within a host, pipeline up to 64) and every ZeRO stage, those that fit, best "
                 "first by predicted tokens a second, each with "
                 "what its fullest rank holds and what a step is made of; and why the others do "
                 "not fit")
      ->excludes(no_meshes);
}

}  // namespace

void AddPlanCommand(CLI::App* app, CommandContext* context) {
  const auto options = std::make_shared<PlanOptions>();
  CLI::App* plan = AddCommand(
      app, context, "plan",
      "Says what a model takes of a cluster before there is one: memory of a rank by kind for "
      "every "
      "ZeRO stage, offload and mesh, bytes a step by phase, the smallest configuration that fits "
      "(fewest devices; then without tensor and pipeline; then fewest bytes moved for a token) and "
      "about how long a step takes. Starts nothing and asks nobody.\n"
      "Exit code 0: something fits; 6: nothing does.\n"
      "Examples: zeroshard plan --parameters 175B --gpus 8 --gpu-memory 80GB --nvme 8TB\n"
      "          zeroshard plan --parameters 175B --gpus 1024 --batch 1536 --search\n"
      "          zeroshard plan job.yaml --gpus 16 --search",
      [context, options] { return Plan(*context, *options); }, /*remote=*/false);
  AddModelOptions(plan, options.get());
  AddClusterOptions(plan, options.get());
}

}  // namespace zeroshard
