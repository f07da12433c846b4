#include "worker/train/restore.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/log.h"
#include "common/saving/completion.h"
#include "common/spec/loss_scale.h"
#include "common/status_macros.h"
#include "worker/train/agreement.h"
#include "worker/zero/sliced_source.h"

namespace zeroshard {
namespace {

// A position beyond this cannot have been reached.
constexpr uint64_t kMostSamples = uint64_t{1} << 60;

bool SameTrainable(const ModelTable& a, const ModelTable& b) {
  if (a.units.size() != b.units.size()) return false;
  for (size_t u = 0; u < a.units.size(); ++u) {
    const auto& x = a.units[u].parameters;
    const auto& y = b.units[u].parameters;
    if (x.size() != y.size()) return false;
    for (size_t i = 0; i < x.size(); ++i)
      if (x[i].trainable != y[i].trainable) return false;
  }
  return true;
}

absl::Status CompareSamples(const TrainerOptions& options, const CheckpointReader& reader) {
  const uint64_t samples = static_cast<uint64_t>(options.data->sample_count());
  if (samples == reader.manifest().samples) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "data.train has %d samples of model.sequence_length tokens, and had %d when %s was written: "
      "its position among them says nothing of these, so that data would be repeated or left out. "
      "Give it the same data, or begin anew with its weights alone (--weights-only)",
      samples, reader.manifest().samples, reader.path()));
}

}  // namespace

absl::StatusOr<InitialState> InitialState::Open(const TrainerOptions& options,
                                                const ModelTable& model) {
  InitialState state;
  state.loss_scale_ = InitialLossScale(options.spec);
  if (options.store != nullptr) {
    ZS_RETURN_IF_ERROR(state.ContinueOffloaded(options));
    return state;
  }
  if (options.resume_from.empty() && options.first_step != 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("asked to begin at step %d without a checkpoint to go on from; wanted 1",
                        options.first_step));
  }
  if (!options.resume_from.empty()) {
    ZS_RETURN_IF_ERROR(
        Agree(options.comm, state.OpenCheckpoint(options, model), "opening the checkpoint"));
    return state;
  }
  const std::string& folder = options.spec.model().init_from();
  if (folder.empty()) return state;
  std::vector<std::string> warnings;
  absl::StatusOr<std::unique_ptr<HfWeights>> weights = HfWeights::Open(folder, model, &warnings);
  ZS_RETURN_IF_ERROR(Agree(options.comm, weights.status(), "opening model.init_from"));
  state.weights_ = *std::move(weights);
  if (options.comm->rank() == 0)
    for (const std::string& warning : warnings) LogWarning(warning);
  return state;
}

// Position and state are the assignment's. Rank 0 still looks whether the data are those of the
// checkpoint that the run once began with: where it has been deleted since, the run had begun.
absl::Status InitialState::ContinueOffloaded(const TrainerOptions& options) {
  if (options.next_sample > kMostSamples) {
    return absl::InvalidArgumentError(
        absl::StrFormat("asked to go on at sample %d of the run's order; wanted at most %d",
                        options.next_sample, kMostSamples));
  }
  position_ = static_cast<int64_t>(options.next_sample);
  loss_scale_ = ContinuedLossScale(options.spec, options.loss_scale);
  if (options.resume_from.empty() || options.weights_only) return absl::OkStatus();
  absl::Status same;
  if (options.comm->rank() == 0) {
    const auto reader = CheckpointReader::Open(options.resume_from);
    if (reader.ok()) {
      same = CompareSamples(options, **reader);
    } else {
      LogWarning("whether the data are those of ", options.resume_from,
                 " is not known: ", reader.status().message());
    }
  }
  return Agree(options.comm, same, "comparing the data");
}

absl::Status InitialState::OpenCheckpoint(const TrainerOptions& options, const ModelTable& model) {
  ZS_ASSIGN_OR_RETURN(reader_, CheckpointReader::Open(options.resume_from));
  ZS_RETURN_IF_ERROR(reader_->CheckModel(model, !options.weights_only));
  const Manifest& manifest = reader_->manifest();
  const uint64_t wanted = options.weights_only ? 1 : manifest.step + 1;
  if (options.first_step != wanted) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "asked to go on at step %d%s, but %s holds the state after step %d; wanted %d",
        options.first_step, options.weights_only ? " with its weights alone" : "", reader_->path(),
        manifest.step, wanted));
  }
  master_ = reader_->Source(StateKind::kMaster);
  if (options.weights_only) return absl::OkStatus();
  resumed_from_ = options.resume_from;
  step_ = manifest.step;
  return ContinueData(options);
}

absl::Status InitialState::ContinueData(const TrainerOptions& options) {
  const Manifest& manifest = reader_->manifest();
  if (manifest.next_sample > kMostSamples) {
    return absl::DataLossError(absl::StrFormat("%s: next_sample is %d; wanted at most %d",
                                               reader_->path(), manifest.next_sample,
                                               kMostSamples));
  }
  ZS_RETURN_IF_ERROR(CompareSamples(options, *reader_));
  position_ = static_cast<int64_t>(manifest.next_sample);
  loss_scale_ = ContinuedLossScale(options.spec, manifest.loss_scale);
  return absl::OkStatus();
}

absl::Status InitialState::Fill(const TrainerOptions& options, const ModelTable& model,
                                const MakeEngine& make, std::unique_ptr<ZeroEngine>* engine) const {
  if (weights_ == nullptr && master_ == nullptr) {
    ZS_ASSIGN_OR_RETURN(*engine, make(nullptr, options.stop));
    return absl::OkStatus();
  }
  std::vector<LoadTask> tasks;
  if (reader_ != nullptr) {
    tasks.push_back([this, &options](LoadSignals* signals) {
      return reader_->VerifyFiles(
          options.comm->rank(), options.comm->size(),
          [signals](uint64_t bytes) { signals->bytes += bytes; }, &signals->stop);
    });
  }
  tasks.push_back([&](LoadSignals* signals) { return LoadAll(model, make, signals, engine); });
  absl::Status status =
      LoadTogether(options.comm, CollectiveDeadline(options.spec), options.stop,
                   absl::StrCat("loading ", reader_ != nullptr ? reader_->path()
                                                               : options.spec.model().init_from()),
                   tasks);
  if (status.ok() && reader_ != nullptr) status = CompareDigests(model, engine->get());
  if (!status.ok()) engine->reset();
  return status;
}

absl::Status InitialState::LoadAll(const ModelTable& model, const MakeEngine& make,
                                   LoadSignals* signals,
                                   std::unique_ptr<ZeroEngine>* engine) const {
  const SignallingSource weights(weights_ != nullptr ? weights_.get() : master_.get(), signals);
  ZS_ASSIGN_OR_RETURN(*engine, make(&weights, &signals->stop));
  if (resumed_from_.empty()) return absl::OkStatus();
  for (StateKind kind : {StateKind::kExpAvg, StateKind::kExpAvgSq}) {
    const std::unique_ptr<ParameterSource> moments = reader_->Source(kind);
    const SignallingSource full(moments.get(), signals);
    std::optional<SlicedSource> sliced;
    if (const TensorRank* slice = (*engine)->slice(); slice != nullptr)
      sliced.emplace(&model, slice, &full);
    const ParameterSource* source = &full;
    if (sliced.has_value()) source = &*sliced;
    ZS_RETURN_IF_ERROR((*engine)->LoadMoments(kind, *source, &signals->stop));
  }
  return absl::OkStatus();
}

absl::Status InitialState::CompareDigests(const ModelTable& model, ZeroEngine* engine) const {
  ZS_ASSIGN_OR_RETURN(const auto seen, engine->LoadedDigests());
  const Manifest& manifest = reader_->manifest();
  // Moments of tensors that are frozen here, or were there, are not the same set.
  const absl::StatusOr<ModelTable> then = MakeModelTable(manifest.spec.model());
  const bool moments = !resumed_from_.empty() && then.ok() && SameTrainable(*then, model);
  for (int kind = 0; kind < (moments ? kStateKinds : 1); ++kind) {
    const std::string& wanted = manifest.digests[kind];
    if (wanted.empty() || seen[static_cast<size_t>(kind)] == wanted) continue;
    return absl::DataLossError(absl::StrFormat(
        "%s: what was loaded of %s has the digest %s; its manifest wants %s. The files are not "
        "what was saved: go on from an older checkpoint",
        reader_->path(), NameOf(static_cast<StateKind>(kind)), seen[static_cast<size_t>(kind)],
        wanted));
  }
  return absl::OkStatus();
}

std::string FindModelFolder(const TrainerOptions& options) {
  return FindModelFolder(options.spec, options.resume_from);
}

std::map<std::string, std::string> FindAssets(const TrainerOptions& options) {
  return FindAssets(options.spec, options.resume_from);
}

}  // namespace zeroshard
