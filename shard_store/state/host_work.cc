// What a job's own threads do: loading, applying, digests, snapshots.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/crash_point.h"
#include "common/log.h"
#include "common/plan/nvme_bytes.h"
#include "common/plan/offload.h"
#include "common/status_macros.h"
#include "shard_store/state/host_job.h"
#include "shard_store/state/host_state.h"
#include "shard_store/state/load_state.h"

namespace zeroshard::store {
namespace {

// Memory that was given up is free within a copy's or a disk write's time.
constexpr double kFreeingSeconds = 10;
constexpr std::chrono::seconds kSnapshotEnd(10);
// A disk that does not answer is given up before.
constexpr std::chrono::seconds kStagingEnd(40);

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void HostJob::Main() {
  bool free = true;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto ends = [this] { return (quit_ || control_.dropped()) && ending_ == 0; };
  while (true) {
    changed_.wait(lock, [&] { return ends() || !operations_.empty() || !dying_.empty(); });
    if (!dying_.empty()) {
      std::vector<std::shared_ptr<HeldState>> dying = std::move(dying_);
      dying_.clear();
      at_work_ = true;
      lock.unlock();
      free = LetGo(std::move(dying)) && free;
      lock.lock();
      at_work_ = false;
    } else if (!operations_.empty()) {
      const Operation operation = std::move(operations_.front());
      operations_.pop_front();
      at_work_ = true;
      lock.unlock();
      const absl::Status status = Caught([&] {
        operation.run();
        return absl::OkStatus();
      });
      if (!status.ok()) FailState(operation.life, status);
      lock.lock();
      at_work_ = false;
    } else {
      break;
    }
  }
  // What a writer has it gives back when its write returns, if it does.
  if (!free) changed_.wait_for(lock, kSnapshotEnd, [this] { return writers_.empty(); });
  over_ = true;
  const bool told = !quit_;
  lock.unlock();
  if (told) SendReport(true);
  JoinWriters(/*all=*/true);
  lock.lock();
  finished_ = true;
  changed_.notify_all();
}

bool HostJob::LetGo(std::vector<std::shared_ptr<HeldState>> dying) {
  bool free = true;
  for (std::shared_ptr<HeldState>& held : dying) {
    // Others are in use on, or by a writer that was given up.
    if (held->dropped && held->state != nullptr) {
      std::unique_lock<std::mutex> lock(mutex_);
      // Who still stages or copies there, which takes as long as the disk; others only come to a
      // state that is loaded later, by this thread.
      const bool unused = changed_.wait_for(lock, kStagingEnd, [this] { return busy_.empty(); });
      lock.unlock();
      // Else it goes with the last of them.
      free = unused && held->state->Free() && free;
    }
    held = nullptr;
  }
  return free;
}

// --- loading -------------------------------------------------------------------------------------

void HostJob::Load(uint64_t life, std::shared_ptr<const std::atomic<bool>> stop,
                   const v1::StoreJob& job, const std::map<uint32_t, Chunk>& chunks,
                   const std::vector<uint32_t>& keep) {
  const std::string run_id = Report().run_id();
  const auto start = std::chrono::steady_clock::now();
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
    hooks.peer_timeout = PeerTimeout(job.spec());
    hooks.start_thread = context_->options.start_thread;
    hooks.doing = [this, life](const std::string& what, bool waits) {
      OnLoading(life, what, waits);
    };
    hooks.reading = [this](const std::string& folder, bool begins) { OnReading(folder, begins); };
    return LoadState(request, *state->model, hooks, state->state.get());
  });
  state = nullptr;
  if (*stop) return;  // whoever stopped it knows
  if (status.ok()) {
    LogInfo("the state of ", run_id, " is here: ", chunks.size() - keep.size(),
            " chunks loaded in ", absl::FormatDuration(absl::Seconds(SecondsSince(start))));
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
  options.writing = &context_->writing;
  options.pool = &context_->pool;
  options.nvme.dir = context_->options.nvme_dir;
  options.nvme.budget = &context_->disk;
  options.nvme.start_thread = context_->options.start_thread;
  options.nvme.counters = &context_->disk_io;
  options.nvme.hook = context_->options.disk_hook;
  options.nvme.stall_limit = context_->options.disk_stall_limit;
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
    on_disk_ = UsesNvme(job.spec());
    state = state_;
  }
  const bool changes = state != nullptr;
  if (changes) {
    // While it changes, and where that fails, no more is held than what stays; on the disk all of
    // it until the new file is there.
    JobStateOptions stays = options;
    stays.chunks.clear();
    for (const uint32_t id : keep)
      if (const auto found = chunks.find(id); found != chunks.end()) stays.chunks.insert(*found);
    std::lock_guard<std::mutex> lock(mutex_);
    if (life != life_) return absl::CancelledError("stopped while loading");
    state->Claim(BytesOf(stays), state->disk_claimed);
  } else {
    if (!keep.empty())
      return absl::InternalError("chunks are to stay that were never loaded on this store");
    state = std::make_shared<HeldState>(&context_->held, &context_->disk_held);
    ZS_ASSIGN_OR_RETURN(ModelTable model, MakeModelTable(job.spec().model()));
    state->model = std::make_unique<const ModelTable>(std::move(model));
  }
  options.model = state->model.get();
  const auto start = std::chrono::steady_clock::now();
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
    if (!absl::IsResourceExhausted(status) || !more || SecondsSince(start) > kFreeingSeconds)
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
  const uint64_t step = decision.step();
  CrashPoint("store.before_apply", step);
  const auto start = std::chrono::steady_clock::now();
  const auto done = std::make_shared<std::promise<absl::Status>>();
  std::future<absl::Status> applied = done->get_future();
  const auto chunks = std::make_shared<std::atomic<int>>(0);
  state->state->Apply(
      decision,
      [this, life, step, chunks](uint32_t chunk, uint32_t digest) {
        // The first gets through meanwhile.
        if ((*chunks)++ != 0) CrashPoint("store.mid_apply", step, kAnyRank, kCrashLinger);
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
  if (!decision.skip()) context_->update_seconds.Add(SecondsSince(start));
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

void HostJob::JoinWriters(bool all) {
  for (auto at = writer_threads_.begin(); at != writer_threads_.end();) {
    bool ended = all;
    if (!ended) {
      std::lock_guard<std::mutex> lock(mutex_);
      ended = !writers_.contains(at->first);
    }
    if (ended) {
      at->second.join();
      at = writer_threads_.erase(at);
    } else {
      ++at;
    }
  }
}

void HostJob::StartSnapshot(uint64_t life, uint64_t number, const v1::SnapshotOrder& order) {
  const auto given_up = [&] { return life != life_ || number != snapshot_number_; };
  const auto writer = std::make_shared<Writer>();
  writer->life = life;
  writer->step = order.step();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // One that was given up is about to be told so.
    changed_.wait(lock, [&] { return ending_ == 0 || given_up(); });
    if (given_up() || state_ == nullptr) return;
    writer->state = state_;
  }
  JoinWriters(/*all=*/false);
  absl::Status status = Caught([&] {
    writer->state->state->PreserveSnapshot(order);
    return absl::OkStatus();
  });
  bool over = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    over = given_up();
    if (!over) {
      writer->number = ++last_writer_;
      writers_.emplace(writer->number, order.folder());
      writer_ = writer;
    }
  }
  if (over) {
    writer->state->state->EndSnapshot();
    return;
  }
  if (status.ok()) {
    std::thread thread;
    status = StartThread(
        context_->options.start_thread,
        [this, writer] {
          GiveWay();
          WriteSnapshot(writer, absl::OkStatus());
        },
        &thread);
    if (status.ok()) writer_threads_.emplace(writer->number, std::move(thread));
  }
  if (!status.ok()) WriteSnapshot(writer, status);
}

void HostJob::WriteSnapshot(const std::shared_ptr<Writer>& writer, absl::Status status) {
  if (status.ok()) {
    // One that was given up ends with the write that is under way.
    std::unique_lock<std::mutex> lock(mutex_);
    const bool first = changed_.wait_for(lock, kSnapshotEnd, [&] {
      return writer->stop || writers_.begin()->first == writer->number;
    });
    if (!first) {
      status = absl::UnavailableError(
          "the file of the snapshot before, which was given up, is still being written; look at "
          "the disk of the checkpoint folder");
    }
  }
  v1::SnapshotReport report;
  if (status.ok() && !writer->stop) {
    FileSystem* files = context_->options.files;
    status = Caught([&] {
      report = writer->state->state->WriteSnapshot(
          files != nullptr ? files : &FileSystem::Real(), [this](uint64_t) { OnProgress(); },
          &writer->stop);
      return absl::OkStatus();
    });
  }
  const bool whole = status.ok() && !writer->stop && report.problem().empty();
  if (whole) context_->snapshot_seconds.Add(SecondsSince(writer->start));
  report.set_step(writer->step);
  report.set_done(true);
  if (!status.ok()) report.set_problem(std::string(status.message()));
  bool given_up = false;
  {
    // Whoever gives it up ends it: by then the next may be kept.
    std::lock_guard<std::mutex> lock(mutex_);
    given_up = writer->stop;
    if (!given_up) ++ending_;
  }
  if (!given_up) {
    writer->state->state->EndSnapshot();
    const absl::Status health = writer->state->state->Health();
    if (!health.ok()) FailState(writer->life, health);
  }
  std::shared_ptr<HeldState> state;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!given_up) --ending_;
    if (writer->life == life_ && !writer->stop) control_.OnSnapshot(report);
    if (writer_ == writer) writer_ = nullptr;
    state = std::move(writer->state);
    changed_.notify_all();
  }
  state = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    writers_.erase(writer->number);
    changed_.notify_all();
  }
  SendReport(false);
}

}  // namespace zeroshard::store
