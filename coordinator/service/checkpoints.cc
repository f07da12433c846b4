#include "coordinator/service/checkpoints.h"

#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/checkpoint/reader.h"
#include "common/descriptor.h"
#include "common/files.h"
#include "common/plan/model_table.h"
#include "common/status_macros.h"
#include "google/protobuf/util/message_differencer.h"

namespace zeroshard::coordinator {
namespace {

constexpr char kLatest[] = "latest";

bool IsAbsolute(const std::string& path) { return !path.empty() && path.front() == '/'; }

std::string Shape(const ParameterInfo& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.shape, ", "), "]");
}

absl::Status Different(const std::string& what, const std::string& checkpoint,
                       const std::string& job) {
  return absl::InvalidArgumentError(absl::StrCat("the checkpoint is of another model: ", what,
                                                 " is ", checkpoint, " in the checkpoint and ", job,
                                                 " in the job"));
}

const char* NameOf(Architecture architecture) {
  return architecture == Architecture::kGpt2 ? "gpt2" : "llama";
}

absl::Status CompareTensors(const ModelTable& job, const ModelTable& checkpoint) {
  std::vector<const ParameterInfo*> wanted, had;
  for (const UnitTable& unit : job.units) {
    for (const ParameterInfo& tensor : unit.parameters) wanted.push_back(&tensor);
  }
  for (const UnitTable& unit : checkpoint.units) {
    for (const ParameterInfo& tensor : unit.parameters) had.push_back(&tensor);
  }
  for (size_t i = 0; i < std::max(wanted.size(), had.size()); ++i) {
    if (i >= had.size()) return Different(wanted[i]->name, "not", Shape(*wanted[i]));
    if (i >= wanted.size()) return Different(had[i]->name, Shape(*had[i]), "not");
    if (wanted[i]->name != had[i]->name) {
      return Different(absl::StrCat("tensor ", i + 1), had[i]->name, wanted[i]->name);
    }
    if (wanted[i]->shape != had[i]->shape) {
      return Different(wanted[i]->name, Shape(*had[i]), Shape(*wanted[i]));
    }
  }
  return absl::OkStatus();
}

// What changes the numbers of the steps to come, among the keys that may change; where it runs and
// what it reports does not count.
std::vector<std::string> Changes(const v1::JobSpec& before, const v1::JobSpec& now) {
  v1::JobSpec specs[] = {before, now};
  for (v1::JobSpec& spec : specs) {
    spec.clear_name();
    spec.clear_steps();
    spec.clear_resources();
    spec.clear_gradient_accumulation_steps();  // follows from the rest
    spec.clear_zero_optimization();
    spec.clear_timeouts();
    spec.clear_checkpoint();
    spec.clear_eval();
    spec.clear_sample();
    spec.mutable_model()->clear_init_from();
  }
  google::protobuf::util::MessageDifferencer differencer;
  std::string report;
  differencer.ReportDifferencesToString(&report);
  differencer.Compare(specs[0], specs[1]);
  std::vector<std::string> changes;
  for (absl::string_view line : absl::StrSplit(report, '\n', absl::SkipEmpty())) {
    absl::ConsumePrefix(&line, "modified: ");
    changes.emplace_back(line);
  }
  return changes;
}

absl::StatusOr<Checkpoint> FindResume(const v1::JobSpec& spec, const std::string& resume_from,
                                      bool weights_only) {
  std::string path = resume_from;
  if (resume_from == kLatest) {
    if (spec.checkpoint().dir().empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("resume_from is \"latest\", but job ", spec.name(),
                       " has no checkpoint section that says where; add one, or give the folder"));
    }
    path = spec.checkpoint().dir();
  }
  if (!IsAbsolute(path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("resume_from is \"", path,
                     "\"; wanted latest or an absolute path, which the workers see too"));
  }
  ZS_ASSIGN_OR_RETURN(FoundCheckpoint found, FindCheckpoint(path));
  const Manifest& manifest = found.manifest;
  absl::Status fits = CompareModels(spec.model(), manifest.spec.model());
  if (!fits.ok()) {
    return absl::Status(fits.code(), absl::StrCat(found.path, ": ", fits.message()));
  }
  const std::string& optimizer = manifest.spec.optimizer().type();
  if (!weights_only && spec.optimizer().type() != optimizer) {
    return absl::InvalidArgumentError(absl::StrCat(
        "optimizer.type is ", spec.optimizer().type(), ", but the moments in ", found.path,
        " are those of ", optimizer,
        ": go on with the same optimizer, or begin anew from its weights (--weights-only)"));
  }
  if (!weights_only && spec.steps() <= manifest.step) {
    return absl::InvalidArgumentError(absl::StrCat("job ", spec.name(), " has ", spec.steps(),
                                                   " steps, the checkpoint ", found.path, " is at ",
                                                   manifest.step, ": raise steps"));
  }
  Checkpoint checkpoint;
  checkpoint.resume.set_checkpoint(found.path);
  checkpoint.resume.set_weights_only(weights_only);
  checkpoint.step = manifest.step;
  checkpoint.run_id = manifest.run_id;
  checkpoint.dir = manifest.spec.checkpoint().dir();
  checkpoint.next_sample = manifest.next_sample;
  if (!weights_only && manifest.loss_scale.scale() != 0)
    *checkpoint.resume.mutable_loss_scale() = manifest.loss_scale;
  checkpoint.skipped = std::move(found.skipped);
  if (!weights_only) checkpoint.changes = Changes(manifest.spec, spec);
  return checkpoint;
}

// A run that begins at step 1 does not go on in a folder that holds another one's checkpoints.
absl::Status CheckFreshFolder(const std::string& dir, bool weights_only) {
  ZS_ASSIGN_OR_RETURN(const std::vector<CheckpointSummary> there, ListCheckpoints(dir));
  const CheckpointSummary* newest = nullptr;
  for (const CheckpointSummary& checkpoint : there) {
    if (checkpoint.complete) newest = &checkpoint;
  }
  if (newest == nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "checkpoint.dir ", dir, " holds checkpoints of run ", newest->run_id, ", the newest of step ",
      newest->step,
      weights_only ? ", and a start from weights alone begins anew at step 1: name another "
                     "checkpoint.dir (and in resume_from the folder that the weights are in)"
                   : ": go on from it with --resume-from latest, or name another checkpoint.dir"));
}

}  // namespace

absl::Status ProbeCheckpointFolder(const std::string& dir) {
  if (absl::Status made = MakeFolders(dir); !made.ok()) {
    return absl::Status(made.code(), absl::StrCat("checkpoint.dir: ", made.message(),
                                                  " (the coordinator must reach it too)"));
  }
  std::string path = dir + "/.probe-XXXXXX";
  const Descriptor file(mkstemp(path.data()));
  int error = file.get() < 0 ? errno : 0;
  if (error == 0 && write(file.get(), "probe", 5) != 5) error = errno;
  if (file.get() >= 0) unlink(path.c_str());
  if (error == 0) return absl::OkStatus();
  const absl::Status failed = ErrnoError(error, "write into", dir);
  return absl::Status(failed.code(), absl::StrCat("checkpoint.dir: ", failed.message(),
                                                  " (the coordinator must reach it too)"));
}

absl::StatusOr<std::optional<Checkpoint>> FindStart(const v1::JobSpec& spec,
                                                    const std::string& resume_from,
                                                    bool weights_only) {
  const std::string& dir = spec.checkpoint().dir();
  if (!dir.empty()) {
    if (!IsAbsolute(dir)) {
      return absl::InvalidArgumentError(
          absl::StrCat("checkpoint.dir is \"", dir,
                       "\"; wanted an absolute path, which means the same on every host"));
    }
    ZS_RETURN_IF_ERROR(ProbeCheckpointFolder(dir));
  }
  if (resume_from.empty()) {
    if (weights_only) {
      return absl::InvalidArgumentError(
          "weights_only is set without resume_from: there is nothing to take the weights from");
    }
    if (!dir.empty()) ZS_RETURN_IF_ERROR(CheckFreshFolder(dir, false));
    return std::nullopt;
  }
  ZS_ASSIGN_OR_RETURN(Checkpoint checkpoint, FindResume(spec, resume_from, weights_only));
  if (weights_only && !dir.empty()) ZS_RETURN_IF_ERROR(CheckFreshFolder(dir, true));
  return checkpoint;
}

absl::StatusOr<std::optional<Checkpoint>> FindNewestOf(const FindNewest& request,
                                                       std::vector<std::string>* instead) {
  const absl::StatusOr<std::vector<CheckpointSummary>> there = ListCheckpoints(request.dir);
  if (absl::IsNotFound(there.status())) {
    instead->emplace_back(there.status().message());
    return std::nullopt;
  }
  if (!there.ok()) return there.status();
  const CheckpointSummary* newest = nullptr;
  std::vector<std::string> skipped;
  for (const CheckpointSummary& checkpoint : *there) {  // by step
    if (!checkpoint.complete) {
      skipped.push_back(checkpoint.problem);
      continue;
    }
    if (checkpoint.run_id != request.run_id || checkpoint.unix_ms < request.since_unix_ms) continue;
    if (newest == nullptr || checkpoint.step <= request.committed_step) {
      newest = &checkpoint;
      skipped.clear();
    }
  }
  if (newest == nullptr) {
    *instead = std::move(skipped);
    return std::nullopt;
  }
  Checkpoint found;
  found.resume.set_checkpoint(newest->path);
  found.step = newest->step;
  found.run_id = newest->run_id;
  found.dir = request.dir;
  found.skipped = std::move(skipped);
  return found;
}

absl::Status CompareModels(const v1::ModelSpec& job, const v1::ModelSpec& checkpoint) {
  ZS_ASSIGN_OR_RETURN(const ModelTable wanted, MakeModelTable(job));
  const absl::StatusOr<ModelTable> had = MakeModelTable(checkpoint);
  if (!had.ok()) {
    return absl::Status(had.status().code(),
                        absl::StrCat("the checkpoint's model: ", had.status().message()));
  }
  const ModelConfig& a = had->config;
  const ModelConfig& b = wanted.config;
  if (a.architecture != b.architecture) {
    return Different("model.architecture", NameOf(a.architecture), NameOf(b.architecture));
  }
  const auto differ = [](const char* key, auto ModelConfig::*field, const ModelConfig& left,
                         const ModelConfig& right) {
    if (left.*field == right.*field) return absl::OkStatus();
    return Different(key, absl::StrCat(left.*field), absl::StrCat(right.*field));
  };
  ZS_RETURN_IF_ERROR(differ("model.hidden_size", &ModelConfig::hidden, a, b));
  ZS_RETURN_IF_ERROR(differ("model.layers", &ModelConfig::layers, a, b));
  ZS_RETURN_IF_ERROR(differ("model.heads", &ModelConfig::heads, a, b));
  ZS_RETURN_IF_ERROR(differ("model.kv_heads", &ModelConfig::kv_heads, a, b));
  ZS_RETURN_IF_ERROR(differ("model.head_dim", &ModelConfig::head_dim, a, b));
  ZS_RETURN_IF_ERROR(differ("model.intermediate_size", &ModelConfig::intermediate, a, b));
  ZS_RETURN_IF_ERROR(differ("model.vocab_size", &ModelConfig::vocab, a, b));
  ZS_RETURN_IF_ERROR(differ("model.norm_epsilon", &ModelConfig::norm_epsilon, a, b));
  ZS_RETURN_IF_ERROR(differ("model.tie_embeddings", &ModelConfig::tied, a, b));
  ZS_RETURN_IF_ERROR(CompareTensors(wanted, *had));
  if (b.architecture == Architecture::kGpt2) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(differ("model.rope_theta", &ModelConfig::rope_theta, a, b));
  const RopeScale& from = a.rope_scale;
  const RopeScale& to = b.rope_scale;
  if (from.kind != to.kind || from.factor != to.factor ||
      from.low_freq_factor != to.low_freq_factor || from.high_freq_factor != to.high_freq_factor ||
      from.original_positions != to.original_positions) {
    return Different("model.rope_scaling",
                     absl::StrCat("{", checkpoint.rope_scaling().ShortDebugString(), "}"),
                     absl::StrCat("{", job.rope_scaling().ShortDebugString(), "}"));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::CheckpointsResponse> DescribeCheckpoints(const std::string& dir) {
  v1::CheckpointsResponse response;
  response.set_dir(dir);
  const absl::StatusOr<std::vector<CheckpointSummary>> there = ListCheckpoints(dir);
  if (absl::IsNotFound(there.status())) return response;
  if (!there.ok()) return there.status();
  for (const CheckpointSummary& checkpoint : *there) {
    v1::CheckpointEntry& entry = *response.add_checkpoints();
    entry.set_step(checkpoint.step);
    entry.set_path(checkpoint.path);
    entry.set_complete(checkpoint.complete);
    entry.set_problem(checkpoint.problem);
    entry.set_bytes(checkpoint.bytes);
    entry.set_unix_ms(checkpoint.unix_ms);
    entry.set_run_id(checkpoint.run_id);
    entry.set_latest(checkpoint.latest);
  }
  return response;
}

}  // namespace zeroshard::coordinator
