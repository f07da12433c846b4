#include "shard_store/state/store_host.h"

#include <map>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/log.h"
#include "shard_store/nvme/stale_files.h"
#include "shard_store/state/host_job.h"

namespace zeroshard::store {
struct StoreHost::Impl {
  explicit Impl(StoreHostOptions options) : context(std::move(options)) {}

  std::shared_ptr<HostJob> Find(const std::string& run_id) const {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = jobs.find(run_id);
    return found == jobs.end() ? nullptr : found->second;
  }
  // Takes out the jobs that are over, of which others may still hold streams.
  void Reap() {
    std::vector<std::shared_ptr<HostJob>> over;
    {
      std::lock_guard<std::mutex> lock(mutex);
      std::erase_if(jobs, [&](const auto& entry) {
        if (!entry.second->over()) return false;
        ended.push_back(entry.second);
        return true;
      });
      std::erase_if(ended, [&](const std::shared_ptr<HostJob>& job) {
        if (!job->finished()) return false;
        over.push_back(job);
        return true;
      });
    }
    for (const auto& job : over) job->Finish();
  }
  std::vector<std::shared_ptr<HostJob>> All() const {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<std::shared_ptr<HostJob>> all;
    for (const auto& [run_id, job] : jobs) all.push_back(job);
    return all;
  }

  HostContext context;
  mutable std::mutex mutex;
  std::map<std::string, std::shared_ptr<HostJob>> jobs;  // by run
  std::vector<std::shared_ptr<HostJob>> ended;           // their threads are on their way
};

namespace {

// Of a job that cannot be begun: as it would be told of one whose state cannot be loaded.
v1::StoreReport NothingHere(const v1::StoreDirective& directive, const absl::Status& status) {
  v1::StoreReport report;
  report.set_term(directive.term());
  report.set_run_id(directive.run_id());
  report.set_generation(directive.generation());
  if (directive.drop()) {
    report.set_dropped(true);
    return report;
  }
  report.set_map_version(directive.map_version());
  report.mutable_version()->set_epoch(directive.epoch());
  report.set_phase(v1::STORE_PHASE_FAILED);
  report.set_problem(std::string(status.message()));
  report.set_error_code(absl::StatusCodeToString(status.code()));
  return report;
}

}  // namespace

StoreHost::StoreHost(StoreHostOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {
  const std::string& folder = impl_->context.options.nvme_dir;
  if (folder.empty()) return;
  // Jobs remove them too, and say what is wrong with the folder.
  const absl::Status removed = nvme::RemoveStaleFiles(folder, absl::Seconds(10));
  if (!removed.ok()) LogWarning("what earlier stores left stays: ", removed.message());
}

StoreHost::~StoreHost() {
  Clear();
  for (const auto& job : impl_->ended) job->Finish();
}

absl::Status StoreHost::Finish(absl::Duration patience) {
  const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(patience);
  Clear();
  std::vector<std::shared_ptr<HostJob>> ended;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    ended = impl_->ended;
  }
  std::vector<std::string> late;
  for (const auto& job : ended) {
    std::string what = job->AwaitFinished(until);
    if (!what.empty()) late.push_back(std::move(what));
  }
  if (late.empty()) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("after ", absl::FormatDuration(patience), ": ", absl::StrJoin(late, "; ")));
}

void StoreHost::OnDirective(const v1::StoreDirective& directive) {
  impl_->Reap();
  const auto& incarnation = impl_->context.options.incarnation;
  const std::string self = incarnation ? incarnation() : "";
  std::shared_ptr<HostJob> job;
  absl::Status started;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    std::shared_ptr<HostJob>& place = impl_->jobs[directive.run_id()];
    if (place == nullptr) {
      place = std::make_shared<HostJob>(directive.run_id(), &impl_->context);
      started = place->Start();
    }
    job = place;
    if (!started.ok()) impl_->jobs.erase(directive.run_id());
  }
  if (started.ok()) {
    job->OnDirective(directive, self);
  } else if (impl_->context.options.on_report) {
    impl_->context.options.on_report(NothingHere(directive, started));
  }
}

std::vector<v1::StoreReport> StoreHost::Reports() const {
  std::vector<v1::StoreReport> reports;
  for (const auto& job : impl_->All()) reports.push_back(job->Report());
  return reports;
}

void StoreHost::Clear() {
  std::map<std::string, std::shared_ptr<HostJob>> jobs;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    jobs.swap(impl_->jobs);
    for (const auto& [run_id, job] : jobs) impl_->ended.push_back(job);
  }
  for (const auto& [run_id, job] : jobs)
    job->End(absl::FailedPreconditionError(
        absl::StrCat("this store was fenced and has forgotten ", run_id)));
}

absl::StatusOr<std::shared_ptr<StoreHost::Stream>> StoreHost::Open(
    const v1::BulkHello& hello, std::function<void(const absl::Status&)> on_end) {
  const std::shared_ptr<HostJob> job = impl_->Find(hello.run_id());
  if (job != nullptr) return job->Open(hello, std::move(on_end));
  // Ranks are sent to stores that have opened their generation, and stores to those that hold what
  // they lack: this process is younger than that.
  const std::string text =
      absl::StrCat("run ", hello.run_id(),
                   " has no state on this store, which was started anew or has dropped it");
  return hello.store() ? absl::NotFoundError(text) : absl::UnavailableError(text);
}

absl::Status StoreHost::Push(Stream* stream, const bulk::Header& header,
                             absl::Span<const absl::Span<const char>> parts) {
  return stream->job->Push(stream, header, parts);
}

void StoreHost::WaitForPush(const std::shared_ptr<Stream>& stream, const bulk::Header& header,
                            PushHandler ready) {
  stream->job->WaitForPush(stream, header, std::move(ready));
}

void StoreHost::Pull(const std::shared_ptr<Stream>& stream, const bulk::Header& header,
                     PullHandler handler) {
  stream->job->Pull(stream, header, std::move(handler));
}

absl::Status StoreHost::State(Stream* stream, const bulk::Header& header,
                              absl::Span<float> values) {
  return stream->job->State(stream, header, values);
}

void StoreHost::Close(const std::shared_ptr<Stream>& stream) { stream->job->Close(stream); }

v1::StoreUsage StoreHost::usage() const {
  v1::StoreUsage total;
  for (const auto& job : impl_->All()) {
    const v1::StoreUsage usage = job->Report().usage();
    total.set_chunks(total.chunks() + usage.chunks());
    total.set_master_bytes(total.master_bytes() + usage.master_bytes());
    total.set_exp_avg_bytes(total.exp_avg_bytes() + usage.exp_avg_bytes());
    total.set_exp_avg_sq_bytes(total.exp_avg_sq_bytes() + usage.exp_avg_sq_bytes());
    total.set_parameter_bytes(total.parameter_bytes() + usage.parameter_bytes());
    total.set_staging_bytes(total.staging_bytes() + usage.staging_bytes());
    total.set_nvme_bytes(total.nvme_bytes() + usage.nvme_bytes());
  }
  return total;
}

StoreHost::Traffic StoreHost::traffic() const {
  return {impl_->context.pushed, impl_->context.pulled, impl_->context.copied};
}

StoreHost::Memory StoreHost::memory() const {
  return {impl_->context.budget.used(), impl_->context.held};
}

StoreHost::Memory StoreHost::disk() const {
  return {impl_->context.disk.used(), impl_->context.disk_held};
}

uint64_t StoreHost::buffer_bytes() const {
  uint64_t bytes = 0;
  for (const auto& job : impl_->All()) bytes += job->buffer_bytes();
  return bytes;
}

size_t StoreHost::jobs() const {
  size_t count = 0;
  for (const auto& job : impl_->All()) count += job->over() ? 0 : 1;
  return count;
}

std::vector<double> StoreHost::TakeUpdateSeconds() { return impl_->context.update_seconds.Take(); }

std::vector<double> StoreHost::TakeSnapshotSeconds() {
  return impl_->context.snapshot_seconds.Take();
}

const nvme::IoCounters& StoreHost::disk_io() const { return impl_->context.disk_io; }

}  // namespace zeroshard::store
