#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/plan/model_table.h"
#include "common/plan/offload.h"
#include "common/spec/batch.h"
#include "common/spec/checks.h"
#include "common/spec/data_section.h"
#include "common/spec/deepspeed_keys.h"
#include "common/spec/job_spec.h"
#include "common/spec/nearest_key.h"
#include "common/spec/offload_section.h"
#include "common/spec/parallel_section.h"
#include "common/spec/scalar.h"
#include "common/spec/timeouts.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

constexpr uint32_t kMaxWorkers = 65536;
constexpr uint32_t kMaxTimeoutSeconds = 7 * 24 * 3600;

absl::Status CheckName(const std::string& name) {
  constexpr size_t kLongest = 63;
  if (name.empty()) return Bad("name: missing; every job needs one, for example name: licences");
  bool good = name.size() <= kLongest && absl::ascii_isalnum(name.front()) &&
              absl::ascii_isalnum(name.back());
  for (const char c : name) {
    good = good && (absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.');
  }
  if (good) return absl::OkStatus();
  return Bad("name: seen ", Shown(name), ", wanted at most ", kLongest,
             " of the characters a-z A-Z 0-9 - _ . that begin and end with a letter or digit: it "
             "becomes a folder and a label");
}

bool IsGraph(unsigned char c) { return absl::ascii_isgraph(c); }

// Before they are compared with every tensor's name.
absl::Status CheckTrainable(const v1::ModelSpec& model) {
  constexpr int kMost = 1000;
  constexpr size_t kLongest = 256;
  if (model.trainable_size() > kMost) {
    return Bad("model.trainable: seen ", model.trainable_size(), " patterns, wanted at most ",
               kMost);
  }
  for (int i = 0; i < model.trainable_size(); ++i) {
    const std::string& pattern = model.trainable(i);
    if (pattern.size() > kLongest || !std::all_of(pattern.begin(), pattern.end(), IsGraph)) {
      return Bad("model.trainable.", i, ": seen ", Shown(pattern), " (", pattern.size(),
                 " bytes), wanted a pattern of at most ", kLongest, " printable characters");
    }
  }
  return absl::OkStatus();
}

absl::Status NormaliseResources(v1::JobSpec* spec) {
  v1::ResourceSpec* resources = spec->mutable_resources();
  if (resources->workers() == 0) {
    return Bad(
        "resources.workers: missing; write how many workers train the job, for example "
        "resources: {workers: 2}");
  }
  if (absl::Status status = CheckCount("resources.workers", resources->workers(), 1, kMaxWorkers);
      !status.ok()) {
    return status;
  }
  if (resources->min_workers() == 0) resources->set_min_workers(resources->workers());
  // Any number of data-parallel ranks goes: micro-batches need not divide among them, the last
  // round may be ragged.
  if (resources->min_workers() > resources->workers()) {
    return Bad("resources.min_workers: seen ", resources->min_workers(),
               ", wanted at most resources.workers, which is ", resources->workers(),
               ": with as many or more the job runs, with fewer it waits");
  }
  return absl::OkStatus();
}

absl::Status CheckLearningRate(const v1::OptimizerParams& params) {
  return CheckReal("optimizer.params.lr", params.lr(), params.lr() > 0, "a number above 0");
}
absl::Status CheckWeightDecay(const v1::OptimizerParams& params) {
  return CheckReal("optimizer.params.weight_decay", params.weight_decay(),
                   params.weight_decay() >= 0, "0 or more");
}

absl::Status NormaliseSgd(v1::JobSpec* spec) {
  v1::OptimizerParams* params = spec->mutable_optimizer()->mutable_params();
  if (!IsOffloaded(*spec)) {
    return Bad(
        "optimizer.type: SGD is for jobs whose state is in the shard stores; write "
        "zero_optimization: {offload_optimizer: {device: cpu}}, or type: AdamW");
  }
  if (!params->betas().empty() || params->has_eps()) {
    return Bad("optimizer.params.", params->has_eps() ? "eps" : "betas",
               ": SGD does not have it; it has lr, momentum, weight_decay");
  }
  // PyTorch's defaults; the weight decay is part of the gradient there and here.
  if (!params->has_lr()) params->set_lr(1e-3);
  if (!params->has_momentum()) params->set_momentum(0.0);
  if (!params->has_weight_decay()) params->set_weight_decay(0.0);
  ZS_RETURN_IF_ERROR(CheckLearningRate(*params));
  ZS_RETURN_IF_ERROR(CheckReal("optimizer.params.momentum", params->momentum(),
                               params->momentum() >= 0 && params->momentum() < 1,
                               "0 <= momentum < 1"));
  return CheckWeightDecay(*params);
}

absl::Status NormaliseOptimizer(v1::JobSpec* spec) {
  v1::OptimizerSpec* optimizer = spec->mutable_optimizer();
  const std::string& type = optimizer->type();
  if (absl::EqualsIgnoreCase(type, "SGD")) {
    optimizer->set_type("SGD");
    return NormaliseSgd(spec);
  }
  if (!type.empty() && !absl::EqualsIgnoreCase(type, "AdamW")) {
    const absl::string_view advice = DeepSpeedOptimizerAdvice(type);
    if (!advice.empty()) {
      return Bad("optimizer.type: ", Shown(type),
                 " is an optimizer of DeepSpeed's that ZeroShard does not support: ", advice);
    }
    return Bad("optimizer.type: seen ", Shown(type), ", wanted AdamW or SGD");
  }
  optimizer->set_type("AdamW");
  v1::OptimizerParams* params = optimizer->mutable_params();
  if (params->has_momentum()) {
    return Bad("optimizer.params.momentum: AdamW does not have it; write betas, or type: SGD");
  }
  // The defaults of the optimizer DeepSpeed builds for AdamW (deepspeed/ops/adam/fused_adam.py).
  if (!params->has_lr()) params->set_lr(1e-3);
  if (params->betas().empty()) {
    params->add_betas(0.9);
    params->add_betas(0.999);
  }
  if (!params->has_eps()) params->set_eps(1e-8);
  if (!params->has_weight_decay()) params->set_weight_decay(0.0);

  if (params->betas_size() != 2) {
    return Bad("optimizer.params.betas: seen ", params->betas_size(),
               " numbers, wanted two, for example [0.9, 0.95]");
  }
  for (int i = 0; i < 2; ++i) {
    const double beta = params->betas(i);
    if (absl::Status status = CheckReal(absl::StrCat("optimizer.params.betas.", i), beta,
                                        beta >= 0 && beta < 1, "0 <= beta < 1");
        !status.ok()) {
      return status;
    }
  }
  ZS_RETURN_IF_ERROR(CheckLearningRate(*params));
  if (absl::Status status =
          CheckReal("optimizer.params.eps", params->eps(), params->eps() > 0, "a number above 0");
      !status.ok()) {
    return status;
  }
  return CheckWeightDecay(*params);
}

const std::map<std::string, std::vector<std::string>>& SchedulerKeys() {
  static const auto* const keys = new std::map<std::string, std::vector<std::string>>{
      {"constant", {"warmup_steps"}},
      {"linear", {"warmup_steps", "min_lr", "total_steps"}},
      {"cosine", {"warmup_steps", "min_lr", "total_steps"}},
      {"WarmupLR", {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"}},
      {"WarmupDecayLR",
       {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"}},
      {"WarmupCosineLR",
       {"total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"}},
  };
  return *keys;
}

absl::Status CheckSchedulerKeys(const v1::SchedulerSpec& scheduler) {
  const auto found = SchedulerKeys().find(scheduler.type());
  if (found == SchedulerKeys().end()) {
    const absl::string_view advice = DeepSpeedSchedulerAdvice(scheduler.type());
    if (!advice.empty()) {
      return Bad("scheduler.type: ", Shown(scheduler.type()),
                 " is a scheduler of DeepSpeed's that ZeroShard does not support: ", advice);
    }
    std::vector<std::string> types;
    for (const auto& [type, unused] : SchedulerKeys()) types.push_back(type);
    return CheckChoice("scheduler.type", scheduler.type(), types);
  }
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  scheduler.params().GetReflection()->ListFields(scheduler.params(), &fields);
  for (const auto* field : fields) {
    const std::vector<std::string>& own = found->second;
    if (std::find(own.begin(), own.end(), field->name()) != own.end()) continue;
    return Bad("scheduler.params.", field->name(), ": the scheduler ", scheduler.type(),
               " does not have it; it has ", absl::StrJoin(own, ", "));
  }
  return absl::OkStatus();
}

absl::Status NormaliseOwnScheduler(v1::JobSpec* spec) {
  v1::SchedulerParams* params = spec->mutable_scheduler()->mutable_params();
  if (!params->has_warmup_steps()) params->set_warmup_steps(0);
  if (absl::Status status =
          CheckCount("scheduler.params.warmup_steps", params->warmup_steps(), 0, kMaxCount);
      !status.ok()) {
    return status;
  }
  if (spec->scheduler().type() == "constant") return absl::OkStatus();
  if (!params->has_min_lr()) params->set_min_lr(0.0);
  // A job cut short (--set steps=5) may end within its warm-up.
  if (!params->has_total_steps()) {
    params->set_total_steps(std::max(spec->steps(), params->warmup_steps()));
  }
  if (absl::Status status =
          CheckCount("scheduler.params.total_steps", params->total_steps(), 1, kMaxCount);
      !status.ok()) {
    return status;
  }
  if (params->warmup_steps() > params->total_steps()) {
    return Bad("scheduler.params.warmup_steps: seen ", params->warmup_steps(),
               ", wanted at most the schedule's steps, ", params->total_steps());
  }
  const double lr = spec->optimizer().params().lr();
  return CheckReal("scheduler.params.min_lr", params->min_lr(),
                   params->min_lr() >= 0 && params->min_lr() <= lr,
                   absl::StrCat("0 to optimizer.params.lr, which is ", DoubleToText(lr)));
}

absl::Status NormaliseDeepSpeedScheduler(v1::JobSpec* spec) {
  const std::string& type = spec->scheduler().type();
  v1::SchedulerParams* params = spec->mutable_scheduler()->mutable_params();
  if (!params->has_warmup_num_steps()) params->set_warmup_num_steps(1000);
  if (!params->has_warmup_type()) params->set_warmup_type("log");
  if (absl::Status status =
          CheckCount("scheduler.params.warmup_num_steps", params->warmup_num_steps(), 1, kMaxCount);
      !status.ok()) {
    return status;
  }
  if (absl::Status status =
          CheckChoice("scheduler.params.warmup_type", params->warmup_type(), {"log", "linear"});
      !status.ok()) {
    return status;
  }
  if (type != "WarmupLR") {
    if (!params->has_total_num_steps()) {
      return Bad("scheduler.params.total_num_steps: missing; ", type,
                 " needs the number of steps to decay over, for example ", spec->steps());
    }
    if (absl::Status status =
            CheckCount("scheduler.params.total_num_steps", params->total_num_steps(), 1, kMaxCount);
        !status.ok()) {
      return status;
    }
  }
  if (type == "WarmupCosineLR") {
    if (!params->has_warmup_min_ratio()) params->set_warmup_min_ratio(0.0);
    if (!params->has_cos_min_ratio()) params->set_cos_min_ratio(1e-4);
    for (const auto& [key, ratio] :
         {std::pair<std::string, double>{"warmup_min_ratio", params->warmup_min_ratio()},
          {"cos_min_ratio", params->cos_min_ratio()}}) {
      if (absl::Status status = CheckReal(absl::StrCat("scheduler.params.", key), ratio,
                                          ratio >= 0 && ratio <= 1, "0 to 1");
          !status.ok()) {
        return status;
      }
    }
    return absl::OkStatus();
  }
  if (!params->has_warmup_min_lr()) params->set_warmup_min_lr(0.0);
  // WarmupLR warms up to the optimizer's rate; WarmupDecayLR's own default is 1e-3.
  if (!params->has_warmup_max_lr()) {
    params->set_warmup_max_lr(type == "WarmupLR" ? spec->optimizer().params().lr() : 1e-3);
  }
  for (const auto& [key, rate] :
       {std::pair<std::string, double>{"warmup_min_lr", params->warmup_min_lr()},
        {"warmup_max_lr", params->warmup_max_lr()}}) {
    if (absl::Status status = CheckReal(absl::StrCat("scheduler.params.", key), rate, rate >= 0,
                                        "a number of 0 or more");
        !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status NormaliseScheduler(v1::JobSpec* spec) {
  v1::SchedulerSpec* scheduler = spec->mutable_scheduler();
  if (scheduler->type().empty()) {
    if (scheduler->has_params() && scheduler->params().ByteSizeLong() > 0) {
      return Bad("scheduler.type: missing; the section has params but not whose they are");
    }
    scheduler->set_type("constant");
  }
  if (absl::Status status = CheckSchedulerKeys(*scheduler); !status.ok()) return status;
  return absl::StartsWith(scheduler->type(), "Warmup") ? NormaliseDeepSpeedScheduler(spec)
                                                       : NormaliseOwnScheduler(spec);
}

absl::Status NormalisePrecision(v1::JobSpec* spec) {
  if (spec->bf16().stochastic_rounding() && !spec->bf16().enabled()) {
    return Bad(
        "bf16.stochastic_rounding: true in a job that does not train in bf16; set bf16.enabled, or "
        "remove it");
  }
  if (spec->tf32() && (spec->bf16().enabled() || spec->fp16().enabled())) {
    const char* const other = spec->bf16().enabled() ? "bf16" : "fp16";
    return Bad(absl::StrCat("tf32: true beside ", other,
                            ".enabled: it is about products of fp32 operands, of which a ", other,
                            " job has none; remove one of the two"));
  }
  if (!spec->fp16().enabled()) return absl::OkStatus();
  if (spec->bf16().enabled()) {
    return Bad("bf16.enabled and fp16.enabled: both true; a job trains in one type: keep bf16");
  }
  // Far from what a float cannot hold, whatever the micro-batch.
  constexpr double kLeastScale = 1e-6, kMostScale = 1e30;
  constexpr uint64_t kMostPower = 63;
  v1::Fp16Spec* fp16 = spec->mutable_fp16();
  if (!fp16->has_loss_scale()) fp16->set_loss_scale(0);
  if (!fp16->has_initial_scale_power()) fp16->set_initial_scale_power(16);
  if (!fp16->has_loss_scale_window()) fp16->set_loss_scale_window(1000);
  if (!fp16->has_hysteresis()) fp16->set_hysteresis(2);
  if (!fp16->has_consecutive_hysteresis()) fp16->set_consecutive_hysteresis(false);
  if (!fp16->has_min_loss_scale()) fp16->set_min_loss_scale(1);
  const double fixed = fp16->loss_scale(), least = fp16->min_loss_scale();
  ZS_RETURN_IF_ERROR(CheckReal("fp16.loss_scale", fixed,
                               fixed == 0 || (fixed >= kLeastScale && fixed <= kMostScale),
                               "0 (found while training) or a number from 1e-6 to 1e30"));
  ZS_RETURN_IF_ERROR(
      CheckCount("fp16.initial_scale_power", fp16->initial_scale_power(), 0, kMostPower));
  ZS_RETURN_IF_ERROR(CheckCount("fp16.loss_scale_window", fp16->loss_scale_window(), 1, kMaxCount));
  ZS_RETURN_IF_ERROR(CheckCount("fp16.hysteresis", fp16->hysteresis(), 1, kMaxCount));
  const auto initial = static_cast<double>(uint64_t{1} << fp16->initial_scale_power());
  return CheckReal("fp16.min_loss_scale", least, least >= kLeastScale && least <= initial,
                   "a number from 1e-6 to 2^initial_scale_power");
}

absl::Status NormaliseZero(v1::JobSpec* spec) {
  v1::ZeroSpec* zero = spec->mutable_zero_optimization();
  if (absl::Status status = CheckCount("zero_optimization.stage", zero->stage(), 0, 3);
      !status.ok()) {
    return status;
  }
  if (!zero->has_reduce_bucket_size()) zero->set_reduce_bucket_size(500'000'000);
  if (!zero->has_stage3_prefetch_bucket_size()) zero->set_stage3_prefetch_bucket_size(50'000'000);
  if (!zero->has_stage3_param_persistence_threshold()) {
    zero->set_stage3_param_persistence_threshold(100'000);
  }
  if (!zero->has_stage3_max_live_parameters()) {
    zero->set_stage3_max_live_parameters(1'000'000'000);
  }
  if (!zero->has_stage3_max_reuse_distance()) zero->set_stage3_max_reuse_distance(1'000'000'000);
  if (!zero->has_overlap_comm()) zero->set_overlap_comm(true);
  const struct {
    absl::string_view key;
    uint64_t seen;
    uint64_t low;
  } sizes[] = {
      {"reduce_bucket_size", zero->reduce_bucket_size(), 1},
      {"stage3_prefetch_bucket_size", zero->stage3_prefetch_bucket_size(), 0},
      {"stage3_param_persistence_threshold", zero->stage3_param_persistence_threshold(), 0},
      {"stage3_max_live_parameters", zero->stage3_max_live_parameters(), 0},
      {"stage3_max_reuse_distance", zero->stage3_max_reuse_distance(), 0},
  };
  for (const auto& size : sizes) {
    // Beyond 2^53 (as with DeepSpeed's sys.maxsize) a size means "no limit" all the same.
    if (absl::Status status = CheckCount(absl::StrCat("zero_optimization.", size.key), size.seen,
                                         size.low, std::numeric_limits<int64_t>::max());
        !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status NormaliseTimeouts(v1::JobSpec* spec) {
  v1::TimeoutSpec* timeouts = spec->mutable_timeouts();
  if (!timeouts->has_start_seconds()) timeouts->set_start_seconds(kStartSeconds);
  if (!timeouts->has_step_seconds()) timeouts->set_step_seconds(kStepSeconds);
  if (!timeouts->has_collective_seconds()) timeouts->set_collective_seconds(kCollectiveSeconds);
  for (const auto& [key, seen] :
       {std::pair<std::string, uint32_t>{"start_seconds", timeouts->start_seconds()},
        {"step_seconds", timeouts->step_seconds()},
        {"collective_seconds", timeouts->collective_seconds()}}) {
    if (absl::Status status =
            CheckCount(absl::StrCat("timeouts.", key), seen, 1, kMaxTimeoutSeconds);
        !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status CheckModel(const v1::ModelSpec& model) {
  if (model.architecture().empty()) {
    return Bad("model.architecture: missing; write gpt2 or llama");
  }
  if (model.architecture() != "gpt2" && model.architecture() != "llama") {
    return Bad("model.architecture: seen ", Shown(model.architecture()), ", wanted gpt2 or llama");
  }
  if (!model.init_from().empty()) {
    absl::Status status = CheckPath("model.init_from", model.init_from());
    if (!status.ok()) return status;
  }
  const absl::StatusOr<ModelTable> table = MakeModelTable(model);
  if (table.ok()) return absl::OkStatus();
  const absl::string_view message = table.status().message();
  return absl::StartsWith(message, "model") ? absl::InvalidArgumentError(message)
                                            : Bad("model: ", message);
}

}  // namespace

absl::Status NormaliseJobSpec(v1::JobSpec* spec) {
  if (absl::Status status = CheckName(spec->name()); !status.ok()) return status;
  if (absl::Status status = CheckTrainable(spec->model()); !status.ok()) return status;
  if (absl::Status status = CheckModel(spec->model()); !status.ok()) return status;
  if (spec->steps() == 0) {
    return Bad(
        "steps: missing or 0; write how many optimizer steps the job trains, for example "
        "steps: 200");
  }
  if (absl::Status status = CheckCount("steps", spec->steps(), 1, kMaxCount); !status.ok()) {
    return status;
  }
  if (absl::Status status = NormaliseResources(spec); !status.ok()) return status;
  if (absl::Status status = NormaliseParallel(spec); !status.ok()) return status;
  if (absl::Status status = NormaliseBatch(spec); !status.ok()) return status;
  if (absl::Status status = NormaliseOptimizer(spec); !status.ok()) return status;
  if (absl::Status status = NormaliseScheduler(spec); !status.ok()) return status;
  if (absl::Status status = CheckReal("gradient_clipping", spec->gradient_clipping(),
                                      spec->gradient_clipping() >= 0, "0 (none) or more");
      !status.ok()) {
    return status;
  }
  if (absl::Status status = NormalisePrecision(spec); !status.ok()) return status;
  if (absl::Status status = NormaliseData(spec); !status.ok()) return status;
  if (absl::Status status = NormaliseCheckpoint(spec); !status.ok()) return status;
  if (absl::Status status = NormaliseZero(spec); !status.ok()) return status;
  if (absl::Status status = NormaliseOffload(spec); !status.ok()) return status;
  if (absl::Status status = NormaliseForMesh(spec); !status.ok()) return status;
  return NormaliseTimeouts(spec);
}

}  // namespace zeroshard
