// A cluster without sockets: the coordinator's core, stores and workers as processes that are
// killed, stopped and started again, and what connects them: sessions that break, calls that get
// lost, bulk messages that are late, repeated and out of order. Not thread-safe.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/events.h"
#include "tests/simulator/disk.h"
#include "tests/simulator/invariants.h"
#include "tests/simulator/reference.h"
#include "tests/simulator/world.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard::simulator {

using coordinator::Reply;
using coordinator::RequestId;
using coordinator::SessionId;

class Cluster;

// A member's process, from its start to its end.
class Process : public std::enable_shared_from_this<Process> {
 public:
  Process(Cluster* cluster, v1::Hello hello) : cluster_(cluster), hello_(std::move(hello)) {}
  virtual ~Process() = default;
  void Start();

  const v1::Hello& hello() const { return hello_; }
  const std::string& name() const { return hello_.name(); }
  bool alive() const { return alive_; }
  absl::Duration paused_until() const { return paused_until_; }

 protected:
  friend class Cluster;
  virtual void OnMessage(const v1::CoordinatorMessage& message) = 0;
  virtual void OnDeath() {}
  // What its Hello and heartbeats say that it runs; nullptr: nothing.
  virtual const v1::Fence* Running() const { return nullptr; }
  virtual const v1::Progress* ProgressNow() const { return nullptr; }

  // In this process, unless it has died by then; when it is stopped, once it wakes.
  void After(absl::Duration delay, std::function<void()> what);
  void Send(v1::MemberMessage message);
  void Connect();
  void Beat();

  Cluster* const cluster_;
  const v1::Hello hello_;
  SessionId session_ = 0;
  bool alive_ = true;
  absl::Duration paused_until_ = absl::ZeroDuration();
  uint64_t beats_ = 0;
};

class SimStore;
class SimWorker;
class SimCoordinator;

struct ClusterOptions {
  int stores = 2;
  int workers = 2;
  int spares = 0;           // workers more than the jobs want
  bool losses = true;       // calls and bulk messages are lost and repeated
  int evaluators_lost = 0;  // most ranks 0 that die with a loss which nobody was told of
};

class Cluster {
 public:
  Cluster(uint64_t seed, const ClusterOptions& options);
  ~Cluster();

  World& world() { return world_; }
  Disk& disk() { return disk_; }
  // By run, who has the lock of its folder of checkpoints.
  std::map<std::string, std::weak_ptr<Process>>& disk_holders() { return disk_holders_; }
  Invariants& invariants() { return invariants_; }
  SimCoordinator& coordinator() { return *coordinator_; }
  const ClusterOptions& options() const { return options_; }
  // By name of the job.
  std::map<std::string, std::unique_ptr<Reference>>& references() { return references_; }
  const Reference& reference(const std::string& job) const { return *references_.at(job); }

  // Never for the checkpoint after the last step, whose failure is the job's.
  bool DiskIsFull(const std::string& job, uint64_t step);

  // Of a store's host: nothing new can be kept there for so long, whatever process asks.
  void BreakDisk(const std::string& store, absl::Duration how_long);
  bool DiskTakes(const std::string& store) const;

  // --- processes ---
  void StartMember(v1::MemberKind kind, const std::string& name);
  void Kill(const std::string& name, bool supervised);
  void Pause(const std::string& name, absl::Duration how_long);
  // Its incarnation was fenced: it begins anew at once.
  void Reincarnate(const std::shared_ptr<Process>& process);
  // Whether rank 0, which has just measured the loss on the validation set, dies with it.
  bool LosesEvaluator();
  // It ends by itself, and another one starts in its place some time later.
  void Leave(const std::shared_ptr<Process>& process);
  // So far, of some checkpoint of the job.
  bool WasFull(const std::string& job) const { return full_.contains(job); }
  std::shared_ptr<Process> Find(const std::string& name) const;
  std::shared_ptr<SimStore> FindStore(const std::string& name) const;
  // Also one that has died.
  std::shared_ptr<SimStore> StoreOf(const std::string& incarnation) const;
  const std::map<std::string, std::shared_ptr<Process>>& members() const { return members_; }

  // --- sessions ---
  void Connect(const std::shared_ptr<Process>& process);
  void SendUp(Process* process, v1::MemberMessage message);
  void SendDown(SessionId session, v1::CoordinatorMessage message);
  void CloseDown(SessionId session);
  void BreakSession(const std::string& name);
  void BreakAll();  // the coordinator is gone

  // --- calls ---
  using MakeEvent = std::function<coordinator::Event(RequestId)>;
  using Answer = std::function<void(bool lost, const Reply& reply)>;
  void Call(const std::shared_ptr<Process>& process, MakeEvent make, Answer answer);
  void OnReply(const Reply& reply);
  void LoseCalls();

  // --- bulk: runs `what` in the store that has this name then, `otherwise` where there is none.
  void AtStore(const std::string& name, std::function<void(SimStore&)> what,
               std::function<void()> otherwise);

  // --- collectives of one generation ---
  // `values` by rank, once all of them are there; never where one does not come.
  void Collective(const std::string& key, uint32_t rank, uint32_t world, std::string value,
                  std::function<void(const std::map<uint32_t, std::string>&)> done);

 private:
  struct Session {
    std::weak_ptr<Process> process;
    uint64_t boot = 0;
    bool broken = false;
    absl::Duration up_free, down_free;  // messages stay in order
  };
  struct Waiting {
    std::weak_ptr<Process> process;
    Answer answer;
  };
  void Deliver(const std::weak_ptr<Process>& process, std::function<void(Process&)> what);
  void BreakSession(SessionId id, bool tell_coordinator, bool tell_member);

  World world_;
  const ClusterOptions options_;
  Disk disk_;
  std::map<std::string, std::weak_ptr<Process>> disk_holders_;
  int evaluators_lost_ = 0;
  std::map<std::string, absl::Duration> broken_;  // disks by store, until when
  std::set<std::string> full_;  // jobs, some checkpoint of which found the disk full
  std::map<std::string, std::unique_ptr<Reference>> references_;
  Invariants invariants_;
  std::unique_ptr<SimCoordinator> coordinator_;
  std::map<std::string, std::shared_ptr<Process>> members_;  // alive
  std::map<std::string, std::shared_ptr<SimStore>> stores_;  // by incarnation, dead ones too
  std::map<SessionId, Session> sessions_;
  std::map<RequestId, Waiting> calls_;
  std::map<
      std::string,
      std::map<uint32_t,
               std::pair<std::string, std::function<void(const std::map<uint32_t, std::string>&)>>>>
      collectives_;
  SessionId last_session_ = 0;
  RequestId last_request_ = 0;
  uint64_t last_process_ = 0;
};

}  // namespace zeroshard::simulator
