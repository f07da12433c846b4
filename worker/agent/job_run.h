// One rank of one generation of a job, from its assignment to its end.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "common/member/cancellation.h"
#include "common/member/cluster_client.h"
#include "common/presence.h"
#include "worker/agent/backend.h"
#include "worker/agent/mesh_links.h"
#include "worker/agent/report_queue.h"
#include "worker/agent/worker_metrics.h"

namespace zeroshard {

// What runs share. Everything outlives the run.
struct JobRunContext {
  const WorkerBackend* backend = nullptr;
  ClusterClient* client = nullptr;
  WorkerMetrics* metrics = nullptr;
  std::shared_ptr<const Presence> presence;  // the coordinator's
  std::string host;                          // where this rank's collectives listen
};

// Run is called once, on one thread; the rest is thread-safe.
class JobRun {
 public:
  JobRun(const JobRunContext& context, v1::Assign assign, v1::Fence fence);

  // Trains, reports how it ended, and has given everything back when it returns. Waits for a
  // coordinator that is away; only Stop ends that.
  void Run();

  // Asks all ranks to write a checkpoint after the step under way and then to end. False, and no
  // effect, where this run's ranks write none: no checkpoint section, or the state is in the
  // stores.
  bool SaveAndStop();

  // The worker is told to leave, because `reason`: the report of the end says so. Where there is
  // something to save, as SaveAndStop, and true; false means that only Stop ends the run.
  bool Leave(const std::string& reason, bool save);

  // Ends the run: collectives are aborted, waits return. The first reason counts. `silent`: the
  // coordinator has turned to something else already and is told nothing more of this run.
  void Stop(const std::string& reason, bool silent = false);

  // The state is in the shard stores.
  bool offloaded() const;

  // The checkpoint after which the run ends is complete.
  bool saved() const;

  const v1::Fence& fence() const { return fence_; }
  v1::Progress progress() const;

 private:
  struct Parts;
  class Observer;

  absl::Status Train(std::string* digest);
  absl::Status Prepare(Parts* parts);
  absl::Status OpenStore(Parts* parts);
  // Ends what this run's threads wait for beyond this process.
  void AbortParts(const std::string& reason);
  bool RanksSave() const;
  absl::Status TrainWith(Parts* parts, std::string* digest);
  absl::Status OpenData(Parts* parts);
  absl::Status CompareData(const std::string& what, const TokenDataset* data,
                           Rendezvous* rendezvous);
  // The coordinator has compared what the workers register with; this is what the job made of it
  // (tf32).
  absl::Status CompareNumerics(const std::string& own, Rendezvous* rendezvous);
  // What a run that is stopped says: also what it had saved before.
  absl::Status WithSaved(const absl::Status& stopped) const;
  absl::Status WithLeaving(const absl::Status& status) const;
  absl::Status Barrier(const std::string& name, uint32_t seconds);
  bool SendEnd(const absl::Status& status, const std::string& digest, absl::Duration timeout,
               Cancellation* cancellation);
  void Enter(const char* phase);
  // Remembers what the rank holds now, and moved last.
  void Measure(const Parts& parts);
  // The reason of Stop, or OK.
  absl::Status Stopped() const;

  const JobRunContext context_;
  const v1::Assign assign_;
  const v1::Fence fence_;

  std::atomic<uint64_t> step_;
  std::atomic<const char*> phase_{"loading"};
  std::atomic<bool> waits_for_ranks_{false};  // of a mesh, in that phase
  std::atomic<uint64_t> advances_{0};
  std::atomic<uint64_t> barrier_nanoseconds_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> silent_{false};
  std::atomic<bool> save_and_stop_{false};
  std::atomic<bool> training_{false};  // steps are being trained

  Cancellation waits_;      // keys, barriers, step reports: ended by Stop and by a failure
  Cancellation last_word_;  // the report of the end: ended by Stop alone
  bool end_sent_ = false;   // the run's thread alone

  mutable std::mutex mutex_;
  absl::Status stopped_;
  v1::RankUsage usage_;  // after the last step
  std::string leaving_;  // why the worker leaves
  std::string saved_;    // the trainer's words, once all ranks have saved and stopped

  std::mutex parts_mutex_;  // also held while they are aborted: they must not go meanwhile
  const MeshLinks* links_ = nullptr;  // while there are some to abort
  StateStore* store_ = nullptr;       // the same
};

}  // namespace zeroshard
