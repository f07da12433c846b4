// What a job's own threads do: loading, applying, digests, snapshots.
#include <algorithm>
#include <exception>
#include <future>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/log.h"
#include "common/plan/offload.h"
#include "common/status_macros.h"
#include "shard_store/state/host_job.h"
#include "shard_store/state/host_state.h"
#include "shard_store/state/load_state.h"

namespace zeroshard::store {
namespace {

// Memory that was given up is free within a copy's or a disk write's time.
constexpr absl::Duration kFreeingTime = absl::Seconds(10);
constexpr std::chrono::seconds kSnapshotEnd(10);
constexpr uint32_t kDefaultStartSeconds = 120;
constexpr size_t kMostSeconds = 1000;

absl::Status Caught(const std::function<absl::Status()>& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory on this host");
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("unexpected exception: ", error.what()));
  }
}

}  // namespace

void HostJob::Main() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] {
      return quit_ || !operations_.empty() || !dying_.empty() || control_.dropped();
    });
    if (!dying_.empty()) {
      std::vector<std::shared_ptr<HeldState>> dying = std::move(dying_);
      dying_.clear();
      freeing_ = true;
      lock.unlock();
      dying.clear();
      lock.lock();
      freeing_ = false;
      continue;
    }
    if (!operations_.empty()) {
      const std::function<void()> run = std::move(operations_.front().run);
      operations_.pop_front();
      working_ = true;
      lock.unlock();
      run();
      lock.lock();
      working_ = false;
      continue;
    }
    if (quit_ || control_.dropped()) break;
  }
  const bool told = !quit_;
  lock.unlock();
  if (snapshot_thread_.joinable()) snapshot_thread_.join();
  if (told) SendReport(true);
  finished_ = true;
}

// --- loading -------------------------------------------------------------------------------------

void HostJob::Load(uint64_t life, std::shared_ptr<const std::atomic<bool>> stop,
                   const v1::StoreJob& job, const std::map<uint32_t, Chunk>& chunks,
                   const std::vector<uint32_t>& keep) {
  const std::string run_id = Report().run_id();
  const absl::Time start = absl::Now();
  std::shared_ptr<HeldState> state;
  const absl::Status status = Caught([&]() -> absl::Status {
    ZS_RETURN_IF_ERROR(MakeState(life, *stop, job, chunks, keep, &state));
    LoadRequest request;
    request.job = job;
    request.chunks = chunks;
    for (const uint32_t id : keep) request.chunks.erase(id);
    request.momentum_only = UsesSgd(job.spec());
    LoadHooks hooks;
    hooks.progress = [this] { OnProgress(); };
    hooks.connect = [this, &job](uint32_t store) { return Connect(job, store); };
    hooks.stop = stop.get();
    const uint32_t seconds = job.spec().timeouts().start_seconds();
    hooks.peer_timeout = absl::Seconds(seconds == 0 ? kDefaultStartSeconds : seconds);
    return LoadState(request, *state->model, hooks, state->state.get());
  });
  state = nullptr;
  if (*stop) return;  // whoever stopped it knows
  if (status.ok()) {
    LogInfo("the state of ", run_id, " is here: ", chunks.size() - keep.size(),
            " chunks loaded in ", absl::FormatDuration(absl::Now() - start));
  } else {
    LogError("the state of ", run_id, " cannot be loaded: ", status.message());
  }
  Tell(life, [this, &status] { return control_.OnLoaded(status); });
}

absl::Status HostJob::MakeState(uint64_t life, const std::atomic<bool>& stop,
                                const v1::StoreJob& job, const std::map<uint32_t, Chunk>& chunks,
                                const std::vector<uint32_t>& keep,
                                std::shared_ptr<HeldState>* out) {
  JobStateOptions options;
  options.spec = job.spec();
  options.chunks = chunks;
  options.digests = job.map().replicas() > 1 || job.spec().store().replicas() > 1;
  options.budget = &context_->budget;
  options.pool = &context_->pool;
  options.nvme.dir = context_->options.nvme_dir;
  options.nvme.budget = &context_->disk;
  const v1::StateVersion& version = job.copies_size() > 0 ? job.copy() : job.base();
  options.nvme.epoch = version.epoch();
  options.nvme.step = version.step();
  options.nvme.chunk_elements = context_->options.chunk_elements;
  if (job.store() < static_cast<uint32_t>(job.map().stores_size()))
    options.nvme.incarnation = job.map().stores(static_cast<int>(job.store())).incarnation();
  const auto install = [&](const std::shared_ptr<HeldState>& state) -> absl::Status {
    std::lock_guard<std::mutex> lock(mutex_);
    if (life != life_) return absl::CancelledError("stopped while loading");
    state_ = state;
    state_->Claim(BytesOf(options), DiskBytesOf(options));
    return absl::OkStatus();
  };
  std::shared_ptr<HeldState> state;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (life != life_) return absl::CancelledError("stopped while loading");
    options.nvme.run_id = control_.report().run_id();
    state = state_;
  }
  const bool changes = state != nullptr;
  if (!changes) {
    if (!keep.empty())
      return absl::InternalError("chunks are to stay that were never loaded on this store");
    state = std::make_shared<HeldState>(&context_->held, &context_->disk_held);
    ZS_ASSIGN_OR_RETURN(ModelTable model, MakeModelTable(job.spec().model()));
    state->model = std::make_unique<const ModelTable>(std::move(model));
  }
  options.model = state->model.get();
  const absl::Time start = absl::Now();
  while (true) {
    absl::Status status;
    if (changes) {
      status = state->state->Change(chunks, keep);
    } else {
      absl::StatusOr<std::unique_ptr<JobState>> made = JobState::Create(options);
      status = made.status();
      if (made.ok()) state->state = *std::move(made);
    }
    if (status.ok()) break;
    // What others have given up, and what is still being sent or written of it, comes free soon.
    const bool more =
        context_->budget.used() > context_->held || context_->disk.used() > context_->disk_held;
    if (!absl::IsResourceExhausted(status) || !more || absl::Now() - start > kFreeingTime)
      return status;
    if (stop) return absl::CancelledError("stopped while loading");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  *out = state;
  return install(state);
}

absl::StatusOr<std::unique_ptr<PeerReader>> HostJob::Connect(const v1::StoreJob& job,
                                                             uint32_t store) {
  const v1::StoreMap& map = job.map();
  if (store >= static_cast<uint32_t>(map.stores_size()) ||
      job.store() >= static_cast<uint32_t>(map.stores_size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("store ", store, " of a map with ", map.stores_size()));
  }
  if (!context_->options.connect_peer)
    return absl::InternalError("this store has no way to reach others");
  const v1::StoreMap::Store& self = map.stores(static_cast<int>(job.store()));
  v1::BulkHello hello;
  hello.set_member(self.member());
  hello.set_incarnation(self.incarnation());
  hello.set_rank(job.store());
  hello.set_store(true);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hello.set_run_id(control_.report().run_id());
    hello.set_generation(control_.generation());
  }
  return context_->options.connect_peer(map.stores(static_cast<int>(store)), hello);
}

// --- steps ---------------------------------------------------------------------------------------

void HostJob::Apply(uint64_t life, const v1::StepDecision& decision) {
  std::shared_ptr<HeldState> state;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // A frame that is being staged a second time, a chunk that is being copied by another store.
    changed_.wait(lock, [this] { return busy_.empty(); });
    if (life != life_) return;
    state = state_;
  }
  if (state == nullptr) {
    Tell(life, [this] {
      return control_.OnApplied(absl::InternalError("a step was decided before anything was here"));
    });
    return;
  }
  const absl::Time start = absl::Now();
  const auto done = std::make_shared<std::promise<absl::Status>>();
  std::future<absl::Status> applied = done->get_future();
  state->state->Apply(
      decision,
      [this, life](uint32_t chunk, uint32_t digest) {
        Calls calls;
        {
          std::lock_guard<std::mutex> lock(mutex_);
          if (life != life_) return;
          control_.OnChunkApplied(chunk, digest);
          Recheck(chunk, &calls);
        }
        Make(calls);
      },
      [done](const absl::Status& status) { done->set_value(status); });
  const absl::Status status = applied.get();
  if (!decision.skip()) {
    std::lock_guard<std::mutex> lock(context_->mutex);
    context_->update_seconds.push_back(absl::ToDoubleSeconds(absl::Now() - start));
    if (context_->update_seconds.size() > kMostSeconds) context_->update_seconds.pop_front();
  }
  state = nullptr;
  if (!status.ok())
    LogError("step ", decision.step(), " of ", Report().run_id(), ": ", status.message());
  Tell(life, [this, &status] { return control_.OnApplied(status); });
}

void HostJob::Digest(uint64_t life, uint64_t step, const std::vector<uint32_t>& chunks) {
  std::shared_ptr<HeldState> state;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (life != life_) return;
    state = state_;
  }
  if (state == nullptr) return;
  const absl::StatusOr<WeightDigest> digest = state->state->Digest(chunks);
  state = nullptr;
  Tell(life, [&] {
    if (digest.ok()) {
      control_.OnDigest(step, digest->low, digest->high);
    } else {
      control_.Fail(digest.status());
    }
    return Orders();
  });
}

// --- snapshots -----------------------------------------------------------------------------------

void HostJob::StartSnapshot(uint64_t life, uint64_t number, const v1::SnapshotOrder& order) {
  const auto given_up = [&] { return life != life_ || number != snapshot_number_; };
  bool ended = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // One that was given up ends with the write that is under way.
    ended = changed_.wait_for(lock, kSnapshotEnd, [&] { return !snapshot_running_ || given_up(); });
    if (given_up()) return;
  }
  if (!ended) {
    Tell(life, [&] {
      v1::SnapshotReport report;
      report.set_step(order.step());
      report.set_done(true);
      report.set_problem(
          "the file of the snapshot before, which was given up, is still being written; look at "
          "the disk of the checkpoint folder");
      control_.OnSnapshot(report);
      return Orders();
    });
    return;
  }
  if (snapshot_thread_.joinable()) snapshot_thread_.join();
  std::lock_guard<std::mutex> lock(mutex_);
  if (given_up() || state_ == nullptr) return;
  state_->state->PreserveSnapshot(order);
  snapshot_running_ = true;
  snapshot_stop_ = std::make_shared<std::atomic<bool>>(false);
  snapshot_state_ = state_;
  snapshot_thread_ = std::thread([this, life, state = state_, stop = snapshot_stop_]() mutable {
    WriteSnapshot(life, std::move(state), stop);
  });
}

void HostJob::WriteSnapshot(uint64_t life, std::shared_ptr<HeldState> state,
                            std::shared_ptr<const std::atomic<bool>> stop) {
  FileSystem* files = context_->options.files;
  v1::SnapshotReport report;
  const absl::Status caught = Caught([&] {
    report = state->state->WriteSnapshot(
        files != nullptr ? files : &FileSystem::Real(), [this](uint64_t) { OnProgress(); },
        stop.get());
    return absl::OkStatus();
  });
  if (!caught.ok()) {
    report.set_done(true);
    report.set_problem(std::string(caught.message()));
  }
  state->state->EndSnapshot();
  if (const absl::Status health = state->state->Health(); !health.ok()) FailState(life, health);
  Calls calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    snapshot_running_ = false;
    snapshot_state_.reset();
    if (life == life_ && !*stop) control_.OnSnapshot(report);
    changed_.notify_all();
  }
  state = nullptr;
  SendReport(false);
}

}  // namespace zeroshard::store
