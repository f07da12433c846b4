// The member's side of Cluster.Session: says hello, sends heartbeats, hands on what the coordinator
// decides, and comes back when the connection is lost.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/member/log_queue.h"
#include "common/member/session_stream.h"
#include "common/presence.h"
#include "zeroshard/v1/cluster.grpc.pb.h"

namespace zeroshard {

// What a member does. Called on the session's threads, without locks held; must not block.
class MemberHandler {
 public:
  virtual ~MemberHandler() = default;
  virtual void OnAssign(const v1::Assign& assign) {}
  virtual void OnStop(const v1::Stop& stop) {}
  virtual void OnStore(const v1::StoreDirective& directive) {}
  // A coordinator has accepted this member, again or for the first time. Before anything else that
  // it says.
  virtual void OnWelcome() {}
  // This incarnation will never be accepted again: end what is running. The session mints a new one
  // and connects again as soon as Running() says that nothing runs.
  virtual void OnFenced(const std::string& reason) {}
  // What runs now and how far it is; false when idle, where a phase alone may still be told. Called
  // for every heartbeat.
  virtual bool Running(v1::Fence* fence, v1::Progress* progress) { return false; }
};

struct MemberSessionOptions {
  std::string coordinator;  // host:port
  v1::Hello hello;          // everything but incarnation, running and progress
  absl::Duration first_backoff = absl::Milliseconds(200);
  absl::Duration most_backoff = absl::Seconds(3);
  // A coordinator that accepts the connection must answer the hello within this; once one has
  // welcomed this member, also within a third of its member timeout, and no pause is longer: it
  // hears two hellos in the time in which it must hear one.
  absl::Duration welcome_timeout = absl::Seconds(10);
  // While nobody answers, one line in the log this often.
  absl::Duration complain_every = absl::Seconds(5);
};

// Thread-safe. Heartbeats have a thread of their own, which never waits for the network.
class MemberSession {
 public:
  // Returns at once; connects in the background and for as long as the session lives. `handler`
  // outlives the session.
  MemberSession(MemberSessionOptions options, MemberHandler* handler);
  // Ends without a goodbye unless Leave was called.
  ~MemberSession();
  MemberSession(const MemberSession&) = delete;
  MemberSession& operator=(const MemberSession&) = delete;

  // OK once a coordinator has welcomed this member (now or earlier). FAILED_PRECONDITION: the last
  // one that answered refused it, and why. UNAUTHENTICATED: TLS or who this member is was not
  // agreed on, with the option that it is about. DEADLINE_EXCEEDED says what else the last attempt
  // met.
  absl::Status WaitWelcome(absl::Duration timeout);

  // Says goodbye and ends; waits at most `timeout` for the coordinator to hear it.
  void Leave(const std::string& reason, absl::Duration timeout);

  std::string incarnation() const;
  bool connected() const;
  // The coordinator's, as this session hears it; may outlive the session.
  std::shared_ptr<const Presence> presence() const { return presence_; }

  // Sends a heartbeat now: something that the coordinator should hear at once has changed.
  void Poke();
  // How a job is on this store, sent as soon as the transport takes it; of a run only the newest is
  // kept until then, also while no coordinator is there.
  void SendReport(const v1::StoreReport& report);
  // Lines for the job's log; may be shared with a log sink that outlives the session.
  const std::shared_ptr<LogQueue>& log_queue() const { return log_queue_; }

 private:
  void Main();
  void ServeStream();
  void BeatUntilEnded(const std::shared_ptr<SessionStream>& stream);
  void SendNextReport(const std::shared_ptr<SessionStream>& stream);
  void SayGoodbye(const std::shared_ptr<SessionStream>& stream);
  void Receive(const v1::CoordinatorMessage& message);
  void WaitWhileAway(absl::Duration pause);
  // The most that one wait of a member that was welcomed before may take; with mutex_ held.
  absl::Duration ShareOfSilence() const;
  v1::MemberMessage Hello();
  v1::MemberMessage Beat();
  // The same, or what is wrong with TLS where that ended the stream.
  absl::Status Explain(const absl::Status& ended);

  const MemberSessionOptions options_;
  MemberHandler* const handler_;
  const std::unique_ptr<v1::Cluster::Stub> stub_;
  const std::shared_ptr<Wakeup> wakeup_ = std::make_shared<Wakeup>();
  const std::shared_ptr<LogQueue> log_queue_ = std::make_shared<LogQueue>();
  const std::shared_ptr<Presence> presence_ = std::make_shared<Presence>();  // told under mutex_

  mutable std::mutex mutex_;
  std::condition_variable welcomed_changed_;
  std::string incarnation_;
  bool welcomed_ = false;  // on this connection
  bool ever_welcomed_ = false;
  bool refused_ = false;
  bool fenced_ = false;
  std::string refusal_;
  std::string cluster_id_;
  uint64_t term_ = 0;
  absl::Duration interval_ = absl::Seconds(1);
  absl::Duration silence_ = absl::Seconds(10);
  std::chrono::steady_clock::time_point heard_;
  absl::Status last_error_;
  std::map<std::string, v1::StoreReport> reports_;  // by run
  std::deque<std::string> report_order_;            // runs of reports_, the longest waiting first
  std::string goodbye_;
  absl::Duration goodbye_timeout_ = absl::ZeroDuration();

  uint64_t sequence_ = 0;  // the thread's own, as is what Explain found out last
  std::chrono::steady_clock::time_point explained_at_;
  std::string explained_, explanation_;
  std::atomic<bool> leaving_{false};
  std::atomic<bool> poked_{false};
  std::thread thread_;
};

}  // namespace zeroshard
