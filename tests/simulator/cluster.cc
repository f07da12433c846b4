#include "tests/simulator/cluster.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/simulator/sim_coordinator.h"
#include "tests/simulator/sim_store.h"
#include "tests/simulator/sim_worker.h"

namespace zeroshard::simulator {
namespace {

constexpr absl::Duration kBeat = absl::Seconds(1);

}  // namespace

// --- a process ----------------------------------------------------------------------------------

void Process::Start() {
  Connect();
  After(kBeat, [this] { Beat(); });
}

void Process::After(absl::Duration delay, std::function<void()> what) {
  std::weak_ptr<Process> self = weak_from_this();
  cluster_->world().After(delay, [self, what = std::move(what)]() mutable {
    const std::shared_ptr<Process> process = self.lock();
    if (process == nullptr || !process->alive_) return;
    const absl::Duration asleep = process->paused_until_ - process->cluster_->world().now();
    if (asleep > absl::ZeroDuration()) return process->After(asleep, std::move(what));
    what();
  });
}

void Process::Send(v1::MemberMessage message) {
  if (session_ != 0) cluster_->SendUp(this, std::move(message));
}

void Process::Connect() { cluster_->Connect(shared_from_this()); }

void Process::Beat() {
  if (session_ != 0) {
    v1::MemberMessage message;
    v1::Heartbeat& beat = *message.mutable_heartbeat();
    beat.set_sequence(++beats_);
    if (Running() != nullptr) *beat.mutable_running() = *Running();
    if (ProgressNow() != nullptr) *beat.mutable_progress() = *ProgressNow();
    Send(std::move(message));
  }
  After(kBeat, [this] { Beat(); });
}

// --- processes ----------------------------------------------------------------------------------

Cluster::Cluster(uint64_t seed, const ClusterOptions& options)
    : world_(seed),
      options_(options),
      invariants_(this),
      coordinator_(std::make_unique<SimCoordinator>(this)) {
  for (int i = 0; i < options.stores; ++i) {
    StartMember(v1::MEMBER_KIND_STORE, absl::StrCat("store-", i));
  }
  for (int i = 0; i < options.workers + options.spares; ++i) {
    StartMember(v1::MEMBER_KIND_WORKER, absl::StrCat("worker-", i));
  }
}

Cluster::~Cluster() = default;

bool Cluster::DiskIsFull(const std::string& job, uint64_t step) {
  const bool full = options_.losses && step != reference(job).spec().steps() && world_.Chance(5);
  if (full) full_.insert(job);
  return full;
}

void Cluster::BreakDisk(const std::string& store, absl::Duration how_long) {
  world_.Trace(
      absl::StrCat("the disk of ", store, " takes nothing for ", absl::FormatDuration(how_long)));
  absl::Duration& until = broken_[store];
  until = std::max(until, world_.now() + how_long);
}

bool Cluster::DiskTakes(const std::string& store) const {
  const auto found = broken_.find(store);
  return found == broken_.end() || world_.now() >= found->second;
}

void Cluster::StartMember(v1::MemberKind kind, const std::string& name) {
  if (members_.contains(name)) return;
  v1::Hello hello;
  hello.set_kind(kind);
  hello.set_name(name);
  hello.set_incarnation(absl::StrFormat("%032x", ++last_process_));
  hello.set_host("host-" + name.substr(name.size() - 1));
  hello.set_address(absl::StrCat(hello.host(), ":7000"));
  hello.set_pid(static_cast<int64_t>(1000 + last_process_));
  hello.set_memory_bytes(uint64_t{1} << 32);
  hello.set_fingerprint("avx2-onednn");
  std::shared_ptr<Process> process;
  if (kind == v1::MEMBER_KIND_STORE) {
    auto store = std::make_shared<SimStore>(
        this, hello, world_.Chance(50) ? absl::Seconds(20) : absl::InfiniteDuration());
    stores_[hello.incarnation()] = store;
    process = store;
  } else {
    process = std::make_shared<SimWorker>(this, hello);
  }
  members_[name] = process;
  world_.Trace(absl::StrCat(name, " starts, incarnation ", last_process_));
  process->Start();
}

void Cluster::Kill(const std::string& name, bool supervised) {
  const auto found = members_.find(name);
  if (found == members_.end()) return;
  const std::shared_ptr<Process> process = found->second;
  world_.Trace(absl::StrCat(name, " is killed"));
  process->OnDeath();
  process->alive_ = false;
  members_.erase(found);
  // The kernel closes its connections, unless its host is gone too.
  const bool host_gone = world_.Chance(15);
  if (process->session_ != 0) BreakSession(process->session_, !host_gone, false);
  if (!supervised) return;
  const RequestId id = ++last_request_;
  v1::ReportExitRequest body;
  body.set_member(name);
  body.set_pid(process->hello_.pid());
  body.set_signal(9);
  world_.After(world_.Latency(), [this, id, body] {
    coordinator_->Handle(coordinator::ReportExit{id, body});
  });
}

void Cluster::Pause(const std::string& name, absl::Duration how_long) {
  const std::shared_ptr<Process> process = Find(name);
  if (process == nullptr) return;
  world_.Trace(absl::StrCat(name, " is stopped for ", absl::FormatDuration(how_long)));
  process->paused_until_ = std::max(process->paused_until_, world_.now() + how_long);
}

void Cluster::Reincarnate(const std::shared_ptr<Process>& process) {
  const std::string name = process->name();
  if (Find(name) != process) return;
  world_.Trace(absl::StrCat(name, " was fenced and begins anew"));
  process->OnDeath();
  process->alive_ = false;
  members_.erase(name);
  if (process->session_ != 0) BreakSession(process->session_, true, false);
  StartMember(process->hello_.kind(), name);
}

void Cluster::Leave(const std::shared_ptr<Process>& process) {
  const std::string name = process->name();
  if (Find(name) != process) return;
  world_.Trace(absl::StrCat(name, " has left"));
  process->OnDeath();
  process->alive_ = false;
  members_.erase(name);
  if (process->session_ != 0) BreakSession(process->session_, true, false);
  world_.After(world_.Between(absl::Milliseconds(50), absl::Seconds(30)),
               [this, name, kind = process->hello_.kind()] { StartMember(kind, name); });
}

bool Cluster::LosesEvaluator() {
  if (evaluators_lost_ >= options_.evaluators_lost || !world_.Chance(25)) return false;
  ++evaluators_lost_;
  invariants_.OnFault();
  return true;
}

std::shared_ptr<Process> Cluster::Find(const std::string& name) const {
  const auto found = members_.find(name);
  return found == members_.end() ? nullptr : found->second;
}

std::shared_ptr<SimStore> Cluster::FindStore(const std::string& name) const {
  return std::dynamic_pointer_cast<SimStore>(Find(name));
}

std::shared_ptr<SimStore> Cluster::StoreOf(const std::string& incarnation) const {
  const auto found = stores_.find(incarnation);
  return found == stores_.end() ? nullptr : found->second;
}

void Cluster::Deliver(const std::weak_ptr<Process>& target, std::function<void(Process&)> what) {
  const std::shared_ptr<Process> process = target.lock();
  if (process == nullptr || !process->alive_) return;
  process->After(absl::ZeroDuration(),
                 [raw = process.get(), what = std::move(what)] { what(*raw); });
}

// --- sessions -----------------------------------------------------------------------------------

void Cluster::Connect(const std::shared_ptr<Process>& process) {
  const std::weak_ptr<Process> self = process;
  process->After(world_.Latency(), [this, self] {
    const std::shared_ptr<Process> process = self.lock();
    if (process->session_ != 0) return;
    if (!coordinator_->up()) {
      process->After(world_.Between(absl::Milliseconds(200), absl::Seconds(3)),
                     [raw = process.get()] { raw->Connect(); });
      return;
    }
    process->session_ = ++last_session_;
    Session& session = sessions_[process->session_];
    session.process = process;
    session.boot = coordinator_->boot();
    session.up_free = session.down_free = world_.now();
    v1::MemberMessage message;
    *message.mutable_hello() = process->hello_;
    if (process->Running() != nullptr)
      *message.mutable_hello()->mutable_running() = *process->Running();
    if (process->ProgressNow() != nullptr) {
      *message.mutable_hello()->mutable_progress() = *process->ProgressNow();
    }
    SendUp(process.get(), std::move(message));
  });
}

void Cluster::SendUp(Process* process, v1::MemberMessage message) {
  const SessionId id = process->session_;
  Session& session = sessions_[id];
  if (session.broken) return;
  session.up_free =
      std::max(session.up_free + absl::Microseconds(1), world_.now() + world_.Latency());
  world_.After(session.up_free - world_.now(), [this, id, message = std::move(message)] {
    const Session& session = sessions_[id];
    if (session.broken || session.boot != coordinator_->boot()) return;
    coordinator_->Handle(coordinator::MemberSaid{id, message});
  });
}

void Cluster::SendDown(SessionId id, v1::CoordinatorMessage message) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.broken) return;
  Session& session = found->second;
  session.down_free =
      std::max(session.down_free + absl::Microseconds(1), world_.now() + world_.Latency());
  world_.After(session.down_free - world_.now(), [this, id, message = std::move(message)] {
    const Session& session = sessions_[id];
    if (session.broken) return;
    Deliver(session.process, [id, message](Process& process) {
      if (process.session_ == id) process.OnMessage(message);
    });
  });
}

void Cluster::CloseDown(SessionId id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.broken) return;
  Session& session = found->second;
  session.down_free =
      std::max(session.down_free + absl::Microseconds(1), world_.now() + world_.Latency());
  world_.After(session.down_free - world_.now(), [this, id] { BreakSession(id, true, true); });
}

void Cluster::BreakSession(const std::string& name) {
  const std::shared_ptr<Process> process = Find(name);
  if (process == nullptr || process->session_ == 0) return;
  world_.Trace(absl::StrCat("the session of ", name, " breaks"));
  BreakSession(process->session_, true, true);
}

void Cluster::BreakSession(SessionId id, bool tell_coordinator, bool tell_member) {
  Session& session = sessions_[id];
  if (session.broken) return;
  session.broken = true;
  if (tell_coordinator) {
    world_.After(world_.Between(absl::Milliseconds(1), absl::Seconds(4)), [this, id] {
      if (sessions_[id].boot == coordinator_->boot()) {
        coordinator_->Handle(coordinator::SessionClosed{id});
      }
    });
  }
  if (!tell_member) return;
  world_.After(world_.Between(absl::Milliseconds(1), absl::Seconds(4)), [this, id] {
    Deliver(sessions_[id].process, [id](Process& process) {
      if (process.session_ != id) return;
      process.session_ = 0;
      process.Connect();
    });
  });
}

void Cluster::BreakAll() {
  for (auto& [id, session] : sessions_) BreakSession(id, false, true);
}

// --- calls --------------------------------------------------------------------------------------

void Cluster::Call(const std::shared_ptr<Process>& process, MakeEvent make, Answer answer) {
  const RequestId id = ++last_request_;
  calls_[id] = Waiting{process, std::move(answer)};
  const auto lose = [this, id](absl::Duration after) {
    world_.After(after, [this, id] {
      const auto found = calls_.find(id);
      if (found == calls_.end()) return;
      const Waiting waiting = std::move(found->second);
      calls_.erase(found);
      Deliver(waiting.process, [answer = waiting.answer](Process&) { answer(true, Reply{}); });
    });
  };
  if (options_.losses && world_.Chance(2))
    return lose(world_.Between(absl::Seconds(1), absl::Seconds(8)));
  world_.After(world_.Latency(), [this, id, make, lose] {
    if (!coordinator_->up()) return lose(world_.Latency());
    if (options_.losses && world_.Chance(2)) {  // its answer gets lost
      lose(absl::ZeroDuration());
      world_.After(world_.Latency(),
                   [this, id] { coordinator_->Handle(coordinator::RequestDropped{id}); });
    }
    coordinator_->Handle(make(id));
  });
}

void Cluster::OnReply(const Reply& reply) {
  world_.After(world_.Latency(), [this, reply] {
    const auto found = calls_.find(reply.request);
    if (found == calls_.end()) return;
    const Waiting waiting = std::move(found->second);
    calls_.erase(found);
    Deliver(waiting.process, [answer = waiting.answer, reply](Process&) { answer(false, reply); });
  });
}

void Cluster::LoseCalls() {
  std::map<RequestId, Waiting> calls;
  calls.swap(calls_);
  for (auto& [id, waiting] : calls) {
    world_.After(world_.Latency(), [this, waiting = waiting] {
      Deliver(waiting.process, [answer = waiting.answer](Process&) { answer(true, Reply{}); });
    });
  }
}

// --- bulk and collectives -----------------------------------------------------------------------

void Cluster::AtStore(const std::string& name, std::function<void(SimStore&)> what,
                      std::function<void()> otherwise) {
  world_.After(world_.Latency(), [this, name, what = std::move(what), otherwise] {
    const std::shared_ptr<Process> store = Find(name);
    if (store == nullptr) return otherwise();
    Deliver(store, [what](Process& process) { what(static_cast<SimStore&>(process)); });
  });
}

void Cluster::Collective(const std::string& key, uint32_t rank, uint32_t world, std::string value,
                         std::function<void(const std::map<uint32_t, std::string>&)> done) {
  auto& joined = collectives_[key];
  joined[rank] = {std::move(value), std::move(done)};
  if (joined.size() < world) return;
  std::map<uint32_t, std::string> values;
  for (auto& [other, entry] : joined) values[other] = entry.first;
  for (auto& [other, entry] : joined) {
    world_.After(world_.Latency(), [values, done = entry.second] { done(values); });
  }
  collectives_.erase(key);
}

}  // namespace zeroshard::simulator
