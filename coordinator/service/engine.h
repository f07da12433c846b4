// Drives the core: events in from any thread, decisions out in order. One mutex around the core; a
// writer thread makes decisions durable and carries them out; a timer thread sends ticks.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "coordinator/core/core.h"
#include "coordinator/service/disk_work.h"
#include "coordinator/service/job_files.h"
#include "coordinator/service/metrics.h"
#include "coordinator/service/snapshot_writer.h"

namespace zeroshard::coordinator {

// One member's stream, as the engine sees it. Thread-safe; never calls back into the engine from
// these.
class SessionSink {
 public:
  virtual ~SessionSink() = default;
  virtual void Send(v1::CoordinatorMessage message) = 0;
  virtual void Close() = 0;
};

// Told that a run has something new to see. Thread-safe.
class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void Notify() = 0;
  // The coordinator ends: finish now.
  virtual void Close() = 0;
};

// Thread-safe.
class Engine {
 public:
  struct Options {
    CoreOptions core;
    std::string data_dir;
    Clock* clock = nullptr;                    // outlives the process's threads
    FileSystem* files = nullptr;               // of checkpoints; null: the real one
    prometheus::Registry* registry = nullptr;  // likewise
    // How long a history may be kept waiting by a system that is out of files or room.
    absl::Duration write_patience = absl::Seconds(30);
    // Called once when the engine cannot go on: the log or a history cannot be written, or the disk
    // takes so long that `max_waiting` decisions wait for it. The process must end with this error.
    // From any thread; must not call the engine.
    std::function<void(const absl::Status&)> on_fatal;
    // At a thousand heartbeats a second the default is more than a minute.
    size_t max_waiting = 100000;
  };
  using ReplyHandler = std::function<void(const Reply&)>;

  // Loads what the log holds, raises the term, takes up live jobs. Errors of the log.
  static absl::StatusOr<std::unique_ptr<Engine>> Start(const Options& options,
                                                       std::unique_ptr<DurableLog> log);
  ~Engine();

  // --- members ---
  SessionId OpenSession(std::shared_ptr<SessionSink> sink);
  void MemberSays(SessionId session, v1::MemberMessage message);
  void SessionEnded(SessionId session);

  // --- calls: `event` gets its request id here; `handler` is called exactly once unless the call
  // is dropped first ---
  template <typename E>
  RequestId Call(E event, ReplyHandler handler) {
    const RequestId id = Register(std::move(handler));
    event.request = id;
    Post(std::move(event));
    return id;
  }
  // The caller gave up. True if the handler was not called and never will be.
  bool Drop(RequestId request);
  // A step's decision was answered; `asked`: what Elapsed said when it was asked for.
  absl::Duration Elapsed() const { return options_.clock->Now(); }
  void CountCommit(absl::Duration asked) { metrics_->ObserveCommit(Elapsed() - asked); }

  // What registry cannot hold; for whoever serves the metrics.
  std::shared_ptr<prometheus::Collectable> plan_metrics() const { return metrics_->plans(); }

  // --- views ---
  struct View {
    v1::JobStatus status;  // its directory is a path that can be opened
    // An ended run of which everything is on disk and told.
    bool settled = false;
    std::string checkpoint_dir;  // of its specification; empty: it saves nothing
  };
  absl::StatusOr<View> Look(const std::string& job) const;
  std::vector<v1::JobStatus> List() const;
  v1::NodesResponse Nodes() const;
  // Which store of an offloaded job holds which chunks.
  struct ShardMap {
    uint64_t version = 0;  // grows with every change; 0: not placed yet
    // Absent where the caller knows this version.
    v1::StoreMap map;
    v1::JobSpec spec;
  };
  // NOT_FOUND: the run. FAILED_PRECONDITION: its state is in no store.
  absl::StatusOr<ShardMap> Shards(const std::string& run_id, uint64_t known) const;
  uint64_t term() const;

  // `watcher` is notified once soon, after everything decided so far was carried out, and then at
  // every change of the run.
  void Watch(const std::string& run_id, std::shared_ptr<Watcher> watcher);
  void Unwatch(const std::string& run_id, const Watcher* watcher);

  // Answers every call with UNAVAILABLE, closes every stream, and stops the threads once all that
  // was decided is carried out.
  void Stop();

 private:
  struct Work {
    Decision decision;
    std::weak_ptr<Watcher> first_look;
  };

  explicit Engine(const Options& options) : options_(options), files_(options.data_dir) {}
  // The core's time, which the writer can hold up; with mutex_ held once the threads run.
  Moment Now() const;
  // The writer is at one batch for so long that the core's time stands still.
  bool Frozen() const;  // with mutex_ held
  absl::Duration MostBusy() const;
  RequestId Register(ReplyHandler handler);
  void Post(Event event);
  void Enqueue(Decision decision);  // with mutex_ held
  void WriterLoop();
  void TimerLoop();
  bool CarryOut(std::vector<Work>& batch);
  void CountCluster();
  absl::Status CarryOut(Action& action);
  absl::Status Insist(const std::function<absl::Status()>& write);
  void Look(const FindNewest& request);
  void NotifyWatchers(const std::string& run_id);
  bool Full() const { return work_.size() >= options_.max_waiting; }  // with mutex_ held
  absl::Status TooMuchWaits() const;
  void Fail(const absl::Status& status);  // without mutex_; only the first counts
  v1::JobStatus WithPath(v1::JobStatus status) const;

  const Options options_;
  JobFiles files_;                                      // the writer thread's
  std::unique_ptr<DurableLog> log_;                     // likewise
  std::unique_ptr<Metrics> metrics_;                    // likewise
  absl::Duration counted_ = -absl::InfiniteDuration();  // likewise

  mutable std::mutex mutex_;
  std::condition_variable work_ready_;
  std::condition_variable timer_changed_;
  std::unique_ptr<Core> core_;
  std::deque<Work> work_;
  std::multiset<std::string> unsettled_;            // ended runs whose end is not yet carried out
  std::optional<absl::Duration> busy_since_;        // the writer, with a batch
  absl::Duration unserved_ = absl::ZeroDuration();  // that the core's time stood still, in all
  bool stopping_ = false;
  bool failed_ = false;

  std::mutex peers_mutex_;  // never held together with mutex_
  SessionId next_session_ = 1;
  RequestId next_request_ = 1;
  std::map<SessionId, std::shared_ptr<SessionSink>> sessions_;
  std::map<RequestId, ReplyHandler> calls_;
  std::multimap<std::string, std::shared_ptr<Watcher>> watchers_;
  bool closed_ = false;

  std::thread writer_;
  std::thread timer_;
  std::unique_ptr<DiskWork> looks_;            // likewise
  std::unique_ptr<SnapshotWriter> snapshots_;  // the writer thread's; last, as both post events
};

}  // namespace zeroshard::coordinator
