#include "worker/agent/job_run.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/log.h"
#include "common/plan/job_mesh.h"
#include "common/plan/model_table.h"
#include "common/plan/offload.h"
#include "common/status_macros.h"
#include "common/status_payloads.h"
#include "worker/agent/assignment.h"
#include "worker/agent/cluster_rendezvous.h"
#include "worker/agent/utf8.h"
#include "worker/zero/sliced_store.h"
#include "worker/zero/staged_store.h"

namespace zeroshard {
namespace {

using Steady = std::chrono::steady_clock;

// How long a failed rank tries to say why before it hangs up on the others, and how long a stopped
// one tries to say that it is out.
constexpr absl::Duration kFirstWord = absl::Seconds(2);
constexpr size_t kMostText = 64 << 10;                  // bytes of a message, of a sample
constexpr absl::Duration kStepLine = absl::Seconds(5);  // between two lines about steps in the log

template <typename Call>
auto Guarded(Call call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        "out of memory on this host; use more workers, a higher ZeRO stage, a smaller "
        "train_micro_batch_size_per_gpu or activation_checkpointing");
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("unexpected exception: ", error.what()));
  }
}

struct EndOfWaits {
  Cancellation* waits;
  ~EndOfWaits() { waits->Cancel(absl::CancelledError("the run is over")); }
};

}  // namespace

// In the order in which they are built; given back in the opposite order.
struct JobRun::Parts {
  WorkerMetrics* metrics = nullptr;
  std::unique_ptr<TokenDataset> data;
  std::unique_ptr<TokenDataset> eval_data;     // where spec.eval names any
  std::shared_ptr<const Tokenizer> tokenizer;  // where spec.sample has prompts
  std::unique_ptr<Device> device;
  std::unique_ptr<Ops> ops;
  std::unique_ptr<StateStore> store;  // of an offloaded job
  MeshLinks links;
  std::unique_ptr<Trainer> trainer;
  ~Parts() { metrics->End(); }  // before what it reads goes
};

class JobRun::Observer : public TrainObserver {
 public:
  static absl::Status StatusOfData(const Parts& parts) {
    if (absl::Status status = parts.data->status(); !status.ok()) return status;
    return parts.eval_data == nullptr ? absl::OkStatus() : parts.eval_data->status();
  }

  Observer(JobRun* run, const Parts* parts, ReportQueue* reports)
      : run_(run), parts_(parts), reports_(reports) {}

  void OnProgress(uint64_t step, StepPhase phase, const std::string& unit) override {
    run_->step_ = step;
    const bool saving = phase == StepPhase::kBarrier &&
                        (unit == "saving" || absl::StartsWith(unit, "waiting for the checkpoint"));
    run_->Enter(saving ? "saving" : NameOf(phase));
    // Before the samples it spoiled are used.
    if (!StatusOfData(*parts_).ok()) run_->stop_ = true;
  }
  void OnWait(bool waits) override { run_->waits_for_ranks_ = waits; }
  void OnStep(const v1::StepRecord& record) override {
    ++run_->advances_;
    if (record.step() >= run_->assign_.first_step()) parts_->metrics->CountStep();
    run_->Measure(*parts_);
    if (reports_ == nullptr) return;
    reports_->Push(record);
    has_loss_ |= record.has_eval_loss();
    if (record.step() < run_->assign_.first_step()) {
      LogInfo(absl::StrFormat("after step %u: evaluation loss %.4f", record.step(),
                              record.eval_loss()));
      return;
    }
    const auto now = Steady::now();
    const bool last = record.step() == run_->assign_.spec().steps();
    if (!first_ && !last && absl::FromChrono(now - line_) < kStepLine) return;
    first_ = false;
    line_ = now;
    LogInfo(absl::StrFormat("step %u of %u: loss %.4f, gradient norm %.3f, %.0f tokens/s",
                            record.step(), run_->assign_.spec().steps(), record.loss(),
                            record.grad_norm(),
                            record.seconds() > 0 ? record.tokens() / record.seconds() : 0.0));
  }
  absl::Status BeforeCommit() override {
    if (reports_ == nullptr || !std::exchange(has_loss_, false)) return absl::OkStatus();
    return reports_->Flush(absl::InfiniteDuration());
  }
  bool ShouldHold() override { return reports_ != nullptr && reports_->ShouldHold(); }
  SaveRequest WantsSave() override {
    return run_->save_and_stop_ ? SaveRequest::kSaveAndStop : SaveRequest::kNone;
  }
  void OnCheckpoint(const v1::CheckpointRecord& record) override {
    ++run_->advances_;
    if (reports_ == nullptr) return;
    v1::CheckpointRecord report = record;
    report.set_path(ValidUtf8(record.path(), kMostText));
    report.set_message(ValidUtf8(record.message(), kMostText));
    if (record.complete()) {
      LogInfo(
          absl::StrFormat("checkpoint of step %u is complete: %s", record.step(), report.path()));
    }
    reports_->Push(std::move(report));
  }
  void OnSample(const v1::SampleRecord& record) override {
    ++run_->advances_;
    if (reports_ == nullptr) return;
    v1::SampleRecord report = record;
    report.set_prompt(ValidUtf8(record.prompt(), kMostText));
    report.set_text(ValidUtf8(record.text(), kMostText));
    reports_->Push(std::move(report));
  }

 private:
  JobRun* const run_;
  const Parts* const parts_;
  ReportQueue* const reports_;  // rank 0's
  bool has_loss_ = false;       // one on the validation set was pushed, and not waited for yet
  bool first_ = true;
  Steady::time_point line_;
};

JobRun::JobRun(const JobRunContext& context, v1::Assign assign, v1::Fence fence)
    : context_(context),
      assign_(std::move(assign)),
      fence_(std::move(fence)),
      step_(assign_.first_step()) {}

void JobRun::Run() {
  LogInfo("job ", assign_.job(), " (run ", assign_.run_id(), ", generation ", assign_.generation(),
          "): rank ", assign_.rank(), " of ", assign_.world_size(), PlaceInMesh(assign_));
  std::string digest;
  const absl::Status status = Train(&digest);
  Enter("waiting");
  if (status.ok()) {
    LogInfo("job ", assign_.job(), ": done", digest.empty() ? "" : ", weights ", digest);
  } else {
    LogWarning("job ", assign_.job(), ": ended: ", absl::StatusCodeToString(status.code()), ": ",
               status.message());
  }
  if (end_sent_) return;
  if (SendEnd(status, digest, absl::InfiniteDuration(), &last_word_) || silent_) return;
  Cancellation none;
  SendEnd(status, digest, kFirstWord, &none);
}

void JobRun::Stop(const std::string& reason, bool silent) {
  const absl::Status status = absl::CancelledError(reason);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopped_.ok()) return;
    stopped_ = status;
    silent_ = silent;
  }
  stop_ = true;
  waits_.Cancel(status);
  last_word_.Cancel(status);
  AbortParts(reason);
}

void JobRun::AbortParts(const std::string& reason) {
  std::lock_guard<std::mutex> lock(parts_mutex_);
  if (links_ != nullptr) links_->Abort(reason);
  if (store_ != nullptr) store_->Abort(reason);
}

bool JobRun::offloaded() const { return IsOffloaded(assign_.spec()); }

bool JobRun::RanksSave() const {
  return !assign_.spec().checkpoint().dir().empty() && !offloaded();
}

bool JobRun::SaveAndStop() {
  if (RanksSave()) save_and_stop_ = true;
  return RanksSave();
}

bool JobRun::saved() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !saved_.empty();
}

bool JobRun::Leave(const std::string& reason, bool save) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    leaving_ = reason;
  }
  if (!save || !training_ || !RanksSave()) return false;
  save_and_stop_ = true;
  return true;
}

v1::Progress JobRun::progress() const {
  v1::Progress progress;
  progress.set_step(step_);
  // Who waits is not to blame when nothing moves.
  progress.set_phase(waits_for_ranks_ ? "waiting" : phase_.load());
  progress.set_advances(advances_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (usage_.ByteSizeLong() != 0) *progress.mutable_usage() = usage_;
  return progress;
}

absl::Status JobRun::Train(std::string* digest) {
  Parts parts;
  parts.metrics = context_.metrics;
  context_.metrics->Begin(assign_.job(), assign_.rank(), assign_.spec().zero_optimization().stage(),
                          &barrier_nanoseconds_);
  absl::Status status = Guarded([&]() -> absl::Status {
    ZS_RETURN_IF_ERROR(Prepare(&parts));
    return TrainWith(&parts, digest);
  });
  if (!status.ok()) {
    if (absl::Status stopped = Stopped(); !stopped.ok()) status = WithSaved(stopped);
    status = WithLeaving(status);
    const absl::Status broken = parts.device == nullptr ? absl::OkStatus() : parts.device->Broken();
    const std::string last = absl::StrCat("ending, as ", broken.message());
    // Hardware that fails is a death of this rank, from which others recover. A kernel that broke
    // the device would do so again: the job hears of it.
    if (absl::IsDataLoss(broken)) context_.backend->exit_process(last);
    // When this rank hangs up, the others report that it is gone: the coordinator should hear the
    // cause first.
    if (Stopped().ok()) end_sent_ = SendEnd(status, "", kFirstWord, &last_word_);
    waits_.Cancel(status);
    AbortParts(std::string(status.message()));
    if (!broken.ok()) context_.backend->exit_process(last);
  }
  std::lock_guard<std::mutex> lock(parts_mutex_);
  links_ = nullptr;
  store_ = nullptr;
  return status;
}

absl::Status JobRun::Prepare(Parts* parts) {
  ZS_RETURN_IF_ERROR(CheckAssignment(assign_));
  ZS_RETURN_IF_ERROR(CheckInitFrom(assign_, context_.host));
  const v1::JobSpec& spec = assign_.spec();
  const absl::Duration start = absl::Seconds(spec.timeouts().start_seconds());
  ZS_RETURN_IF_ERROR(OpenData(parts));
  ZS_RETURN_IF_ERROR(Stopped());
  ZS_ASSIGN_OR_RETURN(parts->device, context_.backend->make_device());
  context_.metrics->SetMemory(&parts->device->memory());
  ZS_ASSIGN_OR_RETURN(parts->ops,
                      context_.backend->make_ops(parts->device.get(), {.tf32 = spec.tf32()}));

  ClusterRendezvous rendezvous(context_.client, fence_, start, &waits_);
  ZS_RETURN_IF_ERROR(CompareData("data.train", parts->data.get(), &rendezvous));
  if (parts->eval_data != nullptr) {
    ZS_RETURN_IF_ERROR(CompareData("eval.data", parts->eval_data.get(), &rendezvous));
  }
  if (spec.deterministic())
    ZS_RETURN_IF_ERROR(CompareNumerics(parts->ops->Fingerprint(), &rendezvous));
  CommunicatorOptions options;
  options.rank = static_cast<int>(assign_.rank());
  options.size = static_cast<int>(assign_.world_size());
  options.host = context_.host;
  options.connect_timeout = start;
  options.operation_timeout = absl::Seconds(spec.timeouts().collective_seconds());
  options.cancelled = &stop_;
  options.deterministic = spec.deterministic();
  // An offloaded step waits for the coordinator in the middle; other ranks' waits are for each
  // other.
  if (offloaded()) options.presence = context_.presence;
  ZS_ASSIGN_OR_RETURN(parts->links,
                      MakeMeshLinks(ShapeOf(assign_), CopiesOf(assign_), options, &rendezvous,
                                    parts->device.get(), context_.backend->make_communicator));
  context_.metrics->SetTraffic(parts->links.Traffic());
  {
    std::lock_guard<std::mutex> lock(parts_mutex_);
    links_ = &parts->links;
  }
  ZS_RETURN_IF_ERROR(Stopped());  // a Stop before this did not see the communicators
  ++advances_;
  if (offloaded()) ZS_RETURN_IF_ERROR(OpenStore(parts));

  TrainerOptions trainer;
  trainer.spec = spec;
  trainer.first_step = assign_.first_step();
  trainer.resume_from = assign_.resume().checkpoint();
  trainer.weights_only = assign_.resume().weights_only();
  trainer.store = parts->store.get();
  trainer.next_sample = assign_.next_sample();
  trainer.loss_scale = assign_.loss_scale();
  trainer.evaluate = assign_.evaluate();
  trainer.job = assign_.job();
  trainer.run_id = assign_.run_id();
  trainer.device = parts->device.get();
  trainer.ops = parts->ops.get();
  trainer.comm = parts->links.DataLine();
  trainer.mesh = parts->links.ForTrainer(ShapeOf(assign_));
  if (spec.parallel().has_virtual_stages())
    trainer.mesh.virtual_stages = static_cast<int>(spec.parallel().virtual_stages());
  trainer.data = parts->data.get();
  trainer.eval_data = parts->eval_data.get();
  trainer.tokenizer = parts->tokenizer.get();
  trainer.stop = &stop_;
  ZS_ASSIGN_OR_RETURN(parts->trainer, context_.backend->make_trainer(trainer));
  context_.metrics->SetTrain(&parts->trainer->counters(), parts->trainer->bubble());
  ++advances_;
  return absl::OkStatus();
}

absl::Status JobRun::OpenStore(Parts* parts) {
  ZS_ASSIGN_OR_RETURN(StoreClientOptions options, StoreClientOptions::Of(assign_, fence_));
  options.client = context_.client;
  options.presence = context_.presence;
  options.cancellation = &waits_;
  const DType type = options.dtype;
  const int64_t most_pushed = options.most_pushed, most_pulled = options.most_pulled;
  ZS_ASSIGN_OR_RETURN(parts->store, context_.backend->open_store(std::move(options)));
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(assign_.spec().model()));
  const MeshShape shape = ShapeOf(assign_);
  const MeshPosition at = PositionOf(shape, static_cast<int>(assign_.rank()));
  parts->store = MakeSlicedStore(std::move(parts->store),
                                 MakeTensorRank(model, shape.tensor, at.tensor), type);
  if (!parts->device->is_host()) {
    ZS_ASSIGN_OR_RETURN(const StageModel part, PartOf(assign_.spec(), model, at));
    const size_t host_bytes =
        StagedBytes(part.model, shape.data, at.data, type, most_pushed, most_pulled);
    parts->store = MakeStagedStore(std::move(parts->store), parts->device.get(), type, host_bytes);
  }
  context_.metrics->SetOffload(&parts->store->counters());
  {
    std::lock_guard<std::mutex> lock(parts_mutex_);
    store_ = parts->store.get();
  }
  ++advances_;
  return Stopped();  // a Stop before this did not see the store
}

absl::Status JobRun::TrainWith(Parts* parts, std::string* digest) {
  const v1::TimeoutSpec& timeouts = assign_.spec().timeouts();
  ZS_RETURN_IF_ERROR(Barrier("start", timeouts.start_seconds()));
  std::unique_ptr<ReportQueue> reports;
  if (assign_.rank() == 0) {
    reports = std::make_unique<ReportQueue>(
        context_.client, fence_, &waits_, [this](const absl::Status& status) {
          // Unblocks the trainer; Flush says why.
          Stop(absl::StrCat("the coordinator refused a step report: ", status.message()));
        });
  }
  // Whatever happens here, the queue's thread does not stay behind in a call.
  const EndOfWaits end_of_waits{&waits_};
  Observer observer(this, parts, reports.get());
  training_ = true;
  Measure(*parts);
  absl::Status status = Guarded([&] { return parts->trainer->Run(&observer, stop_); });
  if (absl::Status data = Observer::StatusOfData(*parts); !data.ok()) status = data;
  // As all ranks were asked to: nobody hangs up before everybody knows that it is complete.
  const bool saved = absl::IsCancelled(status) && !stop_;
  if (saved) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      saved_ = std::string(status.message());
    }
    const absl::Status met = Barrier("saved", timeouts.collective_seconds());
    if (!met.ok() && !stop_) LogWarning("after the last checkpoint: ", met.message());
  }
  if (status.ok()) {
    auto weights = Guarded([&] { return parts->trainer->WeightsDigest(); });
    status = weights.status();
    if (status.ok()) *digest = *std::move(weights);
  }
  if (status.ok()) status = Barrier("finish", timeouts.step_seconds());
  if (reports != nullptr) {
    Enter("waiting");
    const absl::Status flushed =
        reports->Flush(status.ok() || saved ? absl::InfiniteDuration() : kFirstWord);
    if (status.ok()) status = flushed;
  }
  return status;
}

absl::Status JobRun::OpenData(Parts* parts) {
  const v1::JobSpec& spec = assign_.spec();
  const int64_t sequence = spec.model().sequence_length();
  const int64_t vocab = spec.model().vocab_size();
  const bool samples = !spec.sample().prompts().empty();
  DatasetOptions options;
  options.threads = context_.backend->threads;
  // Large ones take seconds to load: once for all that use it.
  const std::string& named = spec.data().tokenizer();
  if (samples || (named != "tokens" && !named.empty())) {
    ZS_ASSIGN_OR_RETURN(options.tokenizer, Tokenizer::Load(named));
    ++advances_;
  }
  if (samples) parts->tokenizer = options.tokenizer;
  ZS_ASSIGN_OR_RETURN(parts->data,
                      context_.backend->open_data(spec.data(), sequence, vocab, options));
  ++advances_;
  if (spec.eval().data().empty()) return absl::OkStatus();
  v1::DataSpec eval = spec.data();
  *eval.mutable_train() = spec.eval().data();
  options.key = "eval.data";
  ZS_ASSIGN_OR_RETURN(parts->eval_data,
                      context_.backend->open_data(eval, sequence, vocab, options));
  ++advances_;
  return absl::OkStatus();
}

absl::Status JobRun::CompareData(const std::string& what, const TokenDataset* data,
                                 Rendezvous* rendezvous) {
  if (assign_.world_size() == 1) return absl::OkStatus();
  const int64_t tokens = data->token_count();
  const std::string key = absl::StrCat(what, "/tokens");
  if (assign_.rank() == 0) return rendezvous->Put(key, absl::StrCat(tokens));
  ZS_ASSIGN_OR_RETURN(
      const std::string text,
      rendezvous->Get(key, absl::Seconds(assign_.spec().timeouts().start_seconds())));
  if (text == absl::StrCat(tokens)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", assign_.rank(), " on ", context_.host, " sees ", tokens, " tokens in ",
                   what, ", rank 0 sees ", text, "; every worker must see the same files"));
}

absl::Status JobRun::CompareNumerics(const std::string& own, Rendezvous* rendezvous) {
  if (assign_.world_size() == 1) return absl::OkStatus();
  const std::string key = "numerics";
  if (assign_.rank() == 0) return rendezvous->Put(key, own);
  ZS_ASSIGN_OR_RETURN(
      const std::string theirs,
      rendezvous->Get(key, absl::Seconds(assign_.spec().timeouts().start_seconds())));
  if (theirs == own) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", assign_.rank(), " on ", context_.host, " computes with \"", own,
                   "\", rank 0 with \"", theirs,
                   "\"; the ranks of a deterministic job need one numeric fingerprint: use workers "
                   "of one kind and build, or deterministic: false"));
}

absl::Status JobRun::Barrier(const std::string& name, uint32_t seconds) {
  Enter("waiting");
  const auto start = Steady::now();
  absl::Status status = context_.client->Barrier(fence_, name, absl::Seconds(seconds), &waits_);
  barrier_nanoseconds_ +=
      static_cast<uint64_t>(std::chrono::nanoseconds(Steady::now() - start).count());
  ++advances_;
  return status;
}

bool JobRun::SendEnd(const absl::Status& status, const std::string& digest, absl::Duration timeout,
                     Cancellation* cancellation) {
  v1::ReportEndRequest request;
  *request.mutable_fence() = fence_;
  request.set_completed(status.ok());
  if (status.ok()) {
    request.set_weights_digest(digest);
  } else {
    request.set_error_code(absl::StatusCodeToString(status.code()));
    request.set_message(ValidUtf8(status.message(), kMostText));
    if (auto rank = BlamedRank(status); rank.has_value()) request.set_blamed_rank(*rank);
    request.set_nonfinite(IsNonFinite(status));
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (usage_.ByteSizeLong() != 0) *request.mutable_usage() = usage_;
  }
  const absl::Status sent = context_.client->ReportEnd(request, timeout, cancellation);
  if (sent.ok() || cancellation->cancelled() || absl::IsDeadlineExceeded(sent)) return sent.ok();
  LogWarning("job ", assign_.job(),
             ": the coordinator refused the report of the end: ", sent.message());
  return true;  // said and answered; there is nothing to add
}

void JobRun::Measure(const Parts& parts) {
  const MemoryAccounting& memory = parts.device->memory();
  const auto bytes = [&memory](MemoryKind kind) {
    return static_cast<uint64_t>(memory.Bytes(kind));
  };
  const StepTraffic last = parts.trainer->last_step();
  v1::RankUsage usage;
  usage.set_parameter_bytes(bytes(MemoryKind::kParameters));
  usage.set_gradient_bytes(bytes(MemoryKind::kGradients));
  usage.set_optimizer_bytes(bytes(MemoryKind::kOptimizer));
  usage.set_activation_bytes(bytes(MemoryKind::kActivations));
  usage.set_buffer_peak_bytes(static_cast<uint64_t>(memory.PeakBytes(MemoryKind::kBuffers)));
  usage.set_step(last.step);
  usage.set_traffic_bytes(last.sent);
  usage.set_push_bytes(last.pushed);
  usage.set_pull_bytes(last.pulled);
  std::lock_guard<std::mutex> lock(mutex_);
  usage_ = std::move(usage);
}

void JobRun::Enter(const char* phase) {
  phase_ = phase;
  ++advances_;
}

absl::Status JobRun::WithSaved(const absl::Status& stopped) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (saved_.empty()) return stopped;
  return absl::CancelledError(absl::StrCat(stopped.message(), "; ", saved_));
}

absl::Status JobRun::WithLeaving(const absl::Status& status) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (leaving_.empty()) return status;
  absl::Status leaving = absl::CancelledError(
      status.message() == leaving_ ? leaving_ : absl::StrCat(leaving_, "; ", status.message()));
  SetBlamedRank(assign_.rank(), &leaving);
  return leaving;
}

absl::Status JobRun::Stopped() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stopped_;
}

}  // namespace zeroshard
