#include "coordinator/service/engine.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/crash_point.h"
#include "common/log.h"
#include "common/random_id.h"
#include "coordinator/core/text.h"
#include "coordinator/service/checkpoints.h"

namespace zeroshard::coordinator {
namespace {

constexpr size_t kMostLooks = 16;  // jobs that recover at a time
constexpr absl::Duration kLookPatience = absl::Seconds(30);

// Of offloaded jobs.
std::vector<uint64_t> DecidedSteps(const std::vector<LogRecord>& records) {
  std::vector<uint64_t> steps;
  for (const LogRecord& record : records) {
    const auto* decided = std::get_if<StepDecisionRecord>(&record);
    if (decided != nullptr) steps.push_back(decided->decision.step());
  }
  return steps;
}

// The crash point that follows what tells somebody of one of the steps; null: none.
std::pair<const char*, uint64_t> PointAfter(const Action& action,
                                            const std::vector<uint64_t>& decided) {
  std::pair<const char*, uint64_t> point = {nullptr, 0};
  if (decided.empty()) return point;
  if (const auto* reply = std::get_if<Reply>(&action); reply != nullptr && reply->status.ok()) {
    point = {"coordinator.after_answer", reply->number};
  } else if (const auto* send = std::get_if<SendToSession>(&action);
             send != nullptr && send->message.has_store()) {
    point = {"coordinator.mid_tell", send->message.store().decision().step()};
  }
  if (std::find(decided.begin(), decided.end(), point.second) == decided.end()) point = {};
  return point;
}

constexpr absl::Duration kFirstRetry = absl::Milliseconds(10), kLastRetry = absl::Seconds(1);
constexpr absl::Duration kSayRetry = absl::Seconds(5);

// Of a writer's batch. While it takes longer nobody gets an answer, and who waits for one is not to
// blame: that time is none to the core.
constexpr absl::Duration kMostBusy = absl::Seconds(1);
constexpr absl::Duration kFrozenLook = absl::Milliseconds(50);  // whether time goes on

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Start(const Options& options,
                                                      std::unique_ptr<DurableLog> log) {
  absl::StatusOr<LoadedState> state = log->Load();
  if (!state.ok()) return state.status();
  std::unique_ptr<Engine> engine(new Engine(options));
  engine->log_ = std::move(log);
  engine->metrics_ = std::make_unique<Metrics>(options.registry);

  // A name's folder is its newest run's.
  std::map<std::string, const LoadedJob*> newest;
  for (const auto& [run_id, job] : state->jobs) {
    const LoadedJob*& entry = newest[job.job.spec.name()];
    if (entry == nullptr || entry->job.order < job.job.order) entry = &job;
  }
  for (auto& [run_id, job] : state->jobs) {
    const std::string& name = job.job.spec.name();
    const bool live = !IsEnded(job.job.state);
    if (live) {
      absl::Status made =
          engine->files_.Prepare(name, run_id, job.job.history_of, job.job.first_step);
      if (!made.ok()) return made;
    }
    const std::string directory =
        absl::StrCat("jobs/", name, newest[name] == &job ? "" : absl::StrCat("@", run_id));
    absl::StatusOr<JobFiles::Ends> ends = engine->files_.Recover(
        directory, live, job.job.first_step, job.job.history_of.empty() ? 1 : job.job.first_step);
    if (!ends.ok()) return ends.status();
    if (!ends->warning.empty()) LogWarning(ends->warning);
    job.first = ends->first;
    job.last = ends->last;
    job.sampled = std::move(ends->sampled);
  }

  engine->core_ = std::make_unique<Core>(options.core, *std::move(state), RandomId());
  Decision decision = engine->core_->Start(engine->Now());
  engine->metrics_->SetTerm(engine->core_->term());
  {
    std::lock_guard<std::mutex> lock(engine->mutex_);
    engine->Enqueue(std::move(decision));
  }
  engine->snapshots_ = std::make_unique<SnapshotWriter>(SnapshotWriter::Options{
      .files = options.files == nullptr ? &FileSystem::Real() : options.files,
      .clock = options.clock,
      .post = [raw = engine.get()](Event event) { raw->Post(std::move(event)); }});
  engine->looks_ = std::make_unique<DiskWork>(kMostLooks);
  engine->writer_ = std::thread([raw = engine.get()] { raw->WriterLoop(); });
  engine->timer_ = std::thread([raw = engine.get()] { raw->TimerLoop(); });
  return engine;
}

Engine::~Engine() { Stop(); }

Moment Engine::Now() const {
  absl::Duration now = Elapsed();
  if (busy_since_) now = std::min(now, *busy_since_ + MostBusy());
  return Moment{now - unserved_, absl::ToUnixMillis(options_.clock->Wall())};
}

absl::Duration Engine::MostBusy() const {
  return std::min(kMostBusy, options_.core.heartbeat_interval);
}

bool Engine::Frozen() const { return busy_since_ && Elapsed() >= *busy_since_ + MostBusy(); }

SessionId Engine::OpenSession(std::shared_ptr<SessionSink> sink) {
  std::unique_lock<std::mutex> lock(peers_mutex_);
  const SessionId id = next_session_++;
  if (!closed_) {
    sessions_[id] = std::move(sink);
    return id;
  }
  lock.unlock();
  sink->Close();
  return id;
}

void Engine::MemberSays(SessionId session, v1::MemberMessage message) {
  Post(MemberSaid{session, std::move(message)});
}

void Engine::SessionEnded(SessionId session) {
  {
    std::lock_guard<std::mutex> lock(peers_mutex_);
    sessions_.erase(session);
    // This process is going away, not the member: its next start must not find it lost.
    if (closed_) return;
  }
  Post(SessionClosed{session});
}

RequestId Engine::Register(ReplyHandler handler) {
  std::unique_lock<std::mutex> lock(peers_mutex_);
  const RequestId id = next_request_++;
  if (!closed_) {
    calls_[id] = std::move(handler);
    return id;
  }
  lock.unlock();
  handler(Reply{id, absl::UnavailableError("the coordinator is shutting down"), "", 0});
  return id;
}

bool Engine::Drop(RequestId request) {
  {
    std::lock_guard<std::mutex> lock(peers_mutex_);
    if (calls_.erase(request) == 0) return false;
  }
  Post(RequestDropped{request});
  return true;
}

void Engine::Post(Event event) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || failed_) return;
    if (!Full()) {
      Enqueue(core_->Decide(event, Now()));
      return;
    }
  }
  Fail(TooMuchWaits());
}

void Engine::Enqueue(Decision decision) {
  for (const Action& action : decision.actions) {
    const RunChanged* changed = std::get_if<RunChanged>(&action);
    if (changed == nullptr) continue;
    const auto run = core_->runs().find(changed->run_id);
    if (run != core_->runs().end() && IsEnded(run->second.job.state)) {
      unsettled_.insert(changed->run_id);
    }
  }
  work_.push_back(Work{std::move(decision), {}});
  work_ready_.notify_one();
  timer_changed_.notify_one();
}

void Engine::TimerLoop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    const absl::Duration left = core_->NextDeadline() - Now().now;
    if (left > absl::ZeroDuration()) {
      const absl::Duration least = Frozen() ? kFrozenLook : absl::ZeroDuration();
      timer_changed_.wait_for(lock, absl::ToChronoNanoseconds(std::max(left, least)));
      continue;
    }
    if (failed_) return;
    if (Full()) {
      lock.unlock();
      Fail(TooMuchWaits());
      return;
    }
    Enqueue(core_->Decide(Tick{}, Now()));
  }
}

void Engine::WriterLoop() {
  while (true) {
    std::vector<Work> batch;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_ready_.wait(lock, [&] { return stopping_ || !work_.empty(); });
      if (work_.empty()) return;
      batch.assign(std::make_move_iterator(work_.begin()), std::make_move_iterator(work_.end()));
      work_.clear();
      busy_since_ = Elapsed();
    }
    const bool carried_out = CarryOut(batch);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      unserved_ += std::max(Elapsed() - *busy_since_ - MostBusy(), absl::ZeroDuration());
      busy_since_.reset();
    }
    if (!carried_out) return;
  }
}

bool Engine::CarryOut(std::vector<Work>& batch) {
  std::vector<LogRecord> records;
  for (Work& work : batch) {
    std::move(work.decision.records.begin(), work.decision.records.end(),
              std::back_inserter(records));
  }
  const std::vector<uint64_t> decided = DecidedSteps(records);
  for (const uint64_t step : decided) CrashPoint("coordinator.before_log", step);
  absl::Status status = log_->Append(records);
  for (const uint64_t step : decided) {
    if (status.ok()) CrashPoint("coordinator.after_log", step);
  }
  for (Work& work : batch) {
    for (const std::string& reason : work.decision.reasons) LogInfo(reason);
    for (Action& action : work.decision.actions) {
      const auto [point, step] = PointAfter(action, decided);
      if (status.ok()) status = CarryOut(action);
      if (point != nullptr) CrashPoint(point, step, kAnyRank, kCrashLinger);
    }
    if (const std::shared_ptr<Watcher> watcher = work.first_look.lock()) watcher->Notify();
  }
  if (status.ok()) {
    CountCluster();
    return true;
  }
  Fail(status);
  return false;
}

void Engine::CountCluster() {
  const absl::Duration now = options_.clock->Now();
  if (now - counted_ < absl::Milliseconds(500)) return;
  counted_ = now;
  std::map<std::pair<std::string, std::string>, size_t> counts;
  std::map<std::string, size_t> missing;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const v1::Node& node : core_->Nodes(Now())) {
      const bool store = node.hello().kind() == v1::MEMBER_KIND_STORE;
      ++counts[{store ? "store" : "worker", node.state()}];
    }
    for (const auto& [run_id, run] : core_->runs()) {
      if (!run.Live()) continue;
      missing[run.job.spec.name()] = run.generation->MostMissing();
    }
  }
  metrics_->SetMembers(counts);
  metrics_->SetBarriers(missing);
  metrics_->Expire(now);
}

absl::Status Engine::CarryOut(Action& action) {
  if (auto* send = std::get_if<SendToSession>(&action)) {
    std::shared_ptr<SessionSink> sink;
    {
      std::lock_guard<std::mutex> lock(peers_mutex_);
      const auto found = sessions_.find(send->session);
      if (found != sessions_.end()) sink = found->second;
    }
    if (sink) sink->Send(std::move(send->message));
  } else if (auto* close = std::get_if<CloseSession>(&action)) {
    std::shared_ptr<SessionSink> sink;
    {
      std::lock_guard<std::mutex> lock(peers_mutex_);
      const auto found = sessions_.find(close->session);
      if (found != sessions_.end()) sink = found->second;
    }
    if (sink) sink->Close();
  } else if (auto* reply = std::get_if<Reply>(&action)) {
    ReplyHandler handler;
    {
      std::lock_guard<std::mutex> lock(peers_mutex_);
      const auto found = calls_.find(reply->request);
      if (found != calls_.end()) {
        handler = std::move(found->second);
        calls_.erase(found);
      }
    }
    if (handler) handler(*reply);
  } else if (auto* folder = std::get_if<PrepareFolder>(&action)) {
    return Insist([&] {
      return files_.Prepare(folder->job, folder->run_id, folder->history_of, folder->first_step);
    });
  } else if (auto* history = std::get_if<AppendHistory>(&action)) {
    absl::Status status = Insist(
        [&] { return files_.AppendHistory(history->job, history->run_id, history->records); });
    if (status.ok()) metrics_->SetSteps(history->job, history->records);
    return status;
  } else if (auto* cut = std::get_if<TruncateHistory>(&action)) {
    absl::Status status =
        Insist([&] { return files_.Truncate(cut->job, cut->run_id, cut->first_step); });
    if (!status.ok()) return status;
    metrics_->SetCommitted(cut->job, cut->first_step - 1);
    Post(HistoryTruncated{cut->run_id});
  } else if (const auto* find = std::get_if<FindNewest>(&action)) {
    Look(*find);
  } else if (auto* open = std::get_if<OpenSnapshots>(&action)) {
    snapshots_->Do(std::move(*open));
  } else if (auto* begin = std::get_if<BeginSnapshot>(&action)) {
    snapshots_->Do(std::move(*begin));
  } else if (auto* complete = std::get_if<CompleteSnapshot>(&action)) {
    snapshots_->Do(std::move(*complete));
  } else if (auto* abandon = std::get_if<AbandonSnapshot>(&action)) {
    snapshots_->Do(std::move(*abandon));
  } else if (auto* let_go = std::get_if<CloseSnapshots>(&action)) {
    snapshots_->Do(std::move(*let_go));
  } else if (auto* samples = std::get_if<AppendSamples>(&action)) {
    const absl::Status status =
        files_.AppendSamples(samples->job, samples->run_id, samples->samples);
    if (!status.ok()) LogWarning("a job's samples are lost: ", status.message());
  } else if (auto* text = std::get_if<AppendLog>(&action)) {
    const absl::Status status = files_.AppendLog(text->job, text->run_id, text->rank, text->lines);
    if (!status.ok()) LogWarning("a job's log lines are lost: ", status.message());
    NotifyWatchers(text->run_id);
  } else if (auto* changed = std::get_if<RunChanged>(&action)) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = unsettled_.find(changed->run_id);
      if (found != unsettled_.end()) unsettled_.erase(found);
    }
    NotifyWatchers(changed->run_id);
  } else if (auto* measure = std::get_if<Measure>(&action)) {
    metrics_->Apply(*measure);
  } else if (auto* appears = std::get_if<JobAppears>(&action)) {
    metrics_->Apply(*appears);
    // Of a job that goes on from a checkpoint, or from before this coordinator started.
    std::unique_lock<std::mutex> lock(mutex_);
    const absl::StatusOr<v1::JobStatus> status = core_->Status(appears->job, Now());
    lock.unlock();
    if (status.ok()) metrics_->SetCommitted(appears->job, status->committed_step());
  } else if (auto* changes = std::get_if<JobChanges>(&action)) {
    metrics_->Apply(*changes, options_.clock->Now());
  }
  return absl::OkStatus();
}

// Connections end, somebody makes room: what the system is out of may come back, and one job's file
// is no reason to end all of them. Nothing that was decided later is carried out meanwhile, heard
// or answered is everybody, and the core's time stands still: nobody is lost for it.
absl::Status Engine::Insist(const std::function<absl::Status()>& write) {
  const absl::Duration start = Elapsed();
  absl::Duration said = -absl::InfiniteDuration();
  absl::Duration pause = kFirstRetry;
  while (true) {
    absl::Status status = write();
    const absl::Duration waited = Elapsed() - start;
    if (!absl::IsResourceExhausted(status)) {
      if (status.ok() && said > -absl::InfiniteDuration()) {
        LogInfo("what could not be written is, after ",
                absl::FormatDuration(absl::Ceil(waited, absl::Milliseconds(1))));
      }
      return status;
    }
    if (waited >= options_.write_patience) return status;
    metrics_->CountRetry();
    if (Elapsed() - said >= kSayRetry) {
      said = Elapsed();
      LogWarning(
          status.message(), "; everybody waits while this is tried again, for ",
          absl::FormatDuration(absl::Ceil(options_.write_patience - waited, absl::Seconds(1))),
          " more: make room, or raise the limit of open files (LimitNOFILE, ulimit -n)");
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (work_ready_.wait_for(lock, absl::ToChronoNanoseconds(pause), [&] { return stopping_; })) {
      return status;
    }
    pause = std::min(pause * 2, kLastRetry);
  }
}

void Engine::Look(const FindNewest& request) {
  auto found = std::make_shared<NewestFound>(NewestFound{request.run_id, std::nullopt});
  looks_->Run(
      absl::StrCat("looking for checkpoints in ", request.dir), kLookPatience,
      [request, found] {
        found->checkpoint = FindNewestOf(request, &found->skipped);
        return found->checkpoint.status();
      },
      [this, run_id = request.run_id, found](const absl::Status& status) {
        // A look that was given up still writes into what it found.
        if (status.ok()) {
          Post(std::move(*found));
        } else {
          Post(NewestFound{run_id, status});
        }
      });
}

void Engine::NotifyWatchers(const std::string& run_id) {
  std::vector<std::shared_ptr<Watcher>> watchers;
  {
    std::lock_guard<std::mutex> lock(peers_mutex_);
    const auto [begin, end] = watchers_.equal_range(run_id);
    for (auto it = begin; it != end; ++it) watchers.push_back(it->second);
  }
  for (const std::shared_ptr<Watcher>& watcher : watchers) watcher->Notify();
}

absl::Status Engine::TooMuchWaits() const {
  return absl::ResourceExhaustedError(absl::StrCat(options_.max_waiting,
                                                   " decisions wait for the disk of ",
                                                   options_.data_dir, "; is it hanging?"));
}

void Engine::Fail(const absl::Status& status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(failed_, true)) return;
  }
  LogError("cannot go on: ", status.message());
  if (options_.on_fatal) options_.on_fatal(status);
}

v1::JobStatus Engine::WithPath(v1::JobStatus status) const {
  status.set_directory(files_.Path(status.directory()));
  return status;
}

absl::StatusOr<Engine::View> Engine::Look(const std::string& job) const {
  std::lock_guard<std::mutex> lock(mutex_);
  absl::StatusOr<v1::JobStatus> status = core_->Status(job, Now());
  if (!status.ok()) return status.status();
  View view;
  if (const auto run = core_->runs().find(status->run_id()); run != core_->runs().end()) {
    view.checkpoint_dir = run->second.job.spec.checkpoint().dir();
  }
  view.settled = IsEnded(status->state()) && !unsettled_.contains(status->run_id());
  view.status = WithPath(*std::move(status));
  return view;
}

std::vector<v1::JobStatus> Engine::List() const {
  std::vector<v1::JobStatus> jobs;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs = core_->List();
  }
  for (v1::JobStatus& job : jobs) job = WithPath(std::move(job));
  return jobs;
}

v1::NodesResponse Engine::Nodes() const {
  v1::NodesResponse response;
  std::lock_guard<std::mutex> lock(mutex_);
  response.set_term(core_->term());
  response.set_cluster_id(core_->cluster_id());
  for (v1::Node& node : core_->Nodes(Now())) *response.add_nodes() = std::move(node);
  return response;
}

absl::StatusOr<Engine::ShardMap> Engine::Shards(const std::string& run_id, uint64_t known) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = core_->runs().find(run_id);
  if (found == core_->runs().end()) {
    return absl::NotFoundError(absl::StrCat("there is no run ", run_id));
  }
  if (found->second.offload == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("run ", run_id, " has no state in the shard stores"));
  }
  const StoreMapRecord& record = found->second.offload->map;
  ShardMap shards;
  shards.version = record.map_version;
  if (shards.version == known) return shards;
  shards.map = record.job.map();
  shards.spec = found->second.job.spec;
  return shards;
}

uint64_t Engine::term() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return core_->term();
}

void Engine::Watch(const std::string& run_id, std::shared_ptr<Watcher> watcher) {
  const std::weak_ptr<Watcher> weak = watcher;
  {
    std::lock_guard<std::mutex> lock(peers_mutex_);
    watchers_.emplace(run_id, std::move(watcher));
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) return;  // Stop closes the watcher
    if (!Full()) {
      work_.push_back(Work{{}, weak});
      work_ready_.notify_one();
      return;
    }
  }
  Fail(TooMuchWaits());
}

void Engine::Unwatch(const std::string& run_id, const Watcher* watcher) {
  std::lock_guard<std::mutex> lock(peers_mutex_);
  const auto [begin, end] = watchers_.equal_range(run_id);
  for (auto it = begin; it != end; ++it) {
    if (it->second.get() != watcher) continue;
    watchers_.erase(it);
    return;
  }
}

void Engine::Stop() {
  std::map<SessionId, std::shared_ptr<SessionSink>> sessions;
  std::map<RequestId, ReplyHandler> calls;
  std::vector<std::shared_ptr<Watcher>> watchers;
  {
    std::lock_guard<std::mutex> lock(peers_mutex_);
    closed_ = true;
    sessions.swap(sessions_);
    calls.swap(calls_);
    for (const auto& [run_id, watcher] : watchers_) watchers.push_back(watcher);
  }
  for (const auto& [id, handler] : calls) {
    handler(Reply{id, absl::UnavailableError("the coordinator is shutting down"), "", 0});
  }
  for (const auto& [id, sink] : sessions) sink->Close();
  for (const std::shared_ptr<Watcher>& watcher : watchers) watcher->Close();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    work_ready_.notify_all();
    timer_changed_.notify_all();
  }
  if (writer_.joinable()) writer_.join();
  if (timer_.joinable()) timer_.join();
  snapshots_.reset();
  looks_.reset();
}

}  // namespace zeroshard::coordinator
