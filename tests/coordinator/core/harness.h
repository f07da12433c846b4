// Drives a Core as the service does, with time, members and requests made up by the test.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "coordinator/core/core.h"
#include "tests/coordinator/core/memory_log.h"

namespace zeroshard::coordinator {

// A member process: its identity, its stream, and what it was told.
struct FakeMember {
  v1::Hello hello;
  SessionId session = 0;
  std::optional<v1::Assign> assign;  // the last one
  std::vector<v1::CoordinatorMessage> inbox;

  v1::Fence Fence() const {
    v1::Fence fence;
    fence.set_member(hello.name());
    fence.set_incarnation(hello.incarnation());
    fence.set_run_id(assign->run_id());
    fence.set_generation(assign->generation());
    fence.set_rank(assign->rank());
    return fence;
  }
  // The last message of a kind; null when there is none.
  const v1::CoordinatorMessage* Last(v1::CoordinatorMessage::MessageCase kind) const {
    for (auto it = inbox.rbegin(); it != inbox.rend(); ++it) {
      if (it->message_case() == kind) return &*it;
    }
    return nullptr;
  }
  std::string StopReason() const {
    const v1::CoordinatorMessage* stop = Last(v1::CoordinatorMessage::kStop);
    return stop == nullptr ? "" : stop->stop().reason();
  }
};

class Harness {
 public:
  explicit Harness(CoreOptions options = {}) : options_(options) { Boot(); }

  // The coordinator's process ends and starts again with what the log and the histories hold.
  void Restart(bool lose_everything = false) {
    if (lose_everything) {
      log_ = MemoryLog();
      history_.clear();
      samples_.clear();
    }
    for (auto& [name, member] : members_) member.session = 0;
    closed_.clear();
    owners_.clear();
    snapshot_actions_.clear();
    held_.clear();
    Boot();
  }

  // --- time ---
  // In steps that a timer would take.
  void Advance(absl::Duration by) {
    const absl::Duration end = now_ + by;
    while (now_ < end) {
      now_ = std::min(end, now_ + options_.heartbeat_interval / 2);
      Step(Tick{});
    }
  }
  // The same while every connected member in `beating` sends heartbeats.
  void AdvanceBeating(absl::Duration by, const std::vector<std::string>& beating) {
    const absl::Duration end = now_ + by;
    while (now_ < end) {
      now_ = std::min(end, now_ + options_.heartbeat_interval / 2);
      for (const std::string& name : beating) Beat(name);
      Step(Tick{});
    }
  }
  // As the service's timer does it: a tick only when one is due, while `beating` send heartbeats in
  // turn, one every `apart`.
  void AdvanceOnDeadlines(absl::Duration by, const std::vector<std::string>& beating,
                          absl::Duration apart) {
    const absl::Duration end = now_ + by;
    for (size_t next = 0; now_ < end; ++next) {
      now_ += apart;
      if (core_->NextDeadline() <= now_) Step(Tick{});
      if (!beating.empty()) Beat(beating[next % beating.size()]);
    }
  }
  // No tick in between: this process did not run.
  void Stall(absl::Duration by) { now_ += by; }

  // --- events ---
  Decision Step(const Event& event) {
    Decision decision = core_->Decide(event, Moment{now_, unix_ms()});
    if (++events_ == crash_at_) {
      if (crash_ != Crash::kBeforeTheLog) (void)log_.Append(decision.records);
      if (crash_ == Crash::kAfterTheLog) KeepHistory(decision);
      Restart();
      return {};
    }
    CarryOut(decision);
    return decision;
  }
  // --- crashes: the n-th event from now is the process's last ---
  enum class Crash { kBeforeTheLog, kAfterTheLog, kBeforeTheHistory };
  void CrashAt(uint64_t event, Crash how) {
    crash_at_ = events_ + event;
    crash_ = how;
  }
  bool CrashIsToCome() const { return crash_at_ > events_; }
  uint64_t events() const { return events_; }
  // How often the coordinator was started; calls and streams of an earlier one are broken.
  int boots() const { return boots_; }

  FakeMember& Join(const std::string& name, const std::string& host = "host-a",
                   uint64_t memory_bytes = 0) {
    FakeMember& member = members_[name];
    member = FakeMember();
    member.hello.set_kind(v1::MEMBER_KIND_WORKER);
    member.hello.set_name(name);
    member.hello.set_incarnation(absl::StrFormat("%032x", ++last_incarnation_));
    member.hello.set_host(host);
    member.hello.set_memory_bytes(memory_bytes);
    member.hello.set_pid(1000 + last_incarnation_);
    member.hello.set_fingerprint("avx2-onednn");
    Connect(name);
    return member;
  }
  FakeMember& JoinStore(const std::string& name, const std::string& host = "host-s",
                        uint64_t memory_bytes = 1 << 30, uint64_t nvme_bytes = 0) {
    FakeMember& member = members_[name];
    member = FakeMember();
    member.hello.set_kind(v1::MEMBER_KIND_STORE);
    member.hello.set_name(name);
    member.hello.set_incarnation(absl::StrFormat("%032x", ++last_incarnation_));
    member.hello.set_host(host);
    member.hello.set_address(absl::StrCat(host, ":", 7000 + last_incarnation_));
    member.hello.set_memory_bytes(memory_bytes);
    member.hello.set_nvme_bytes(nvme_bytes);
    member.hello.set_pid(1000 + last_incarnation_);
    Connect(name);
    return member;
  }
  void JoinMany(int count) {
    for (int i = 0; i < count; ++i) Join(absl::StrCat("worker-", i));
  }
  // Says Hello on a new stream; `running`: with the assignment that it has.
  void Connect(const std::string& name, bool running = false) {
    FakeMember& member = members_[name];
    member.session = ++last_session_;
    owners_[member.session] = name;
    MemberSaid said{member.session, {}};
    *said.message.mutable_hello() = member.hello;
    if (running) *said.message.mutable_hello()->mutable_running() = member.Fence();
    Step(said);
  }
  void Disconnect(const std::string& name) {
    const SessionId session = std::exchange(members_[name].session, 0);
    if (session != 0) Step(SessionClosed{session});
  }
  // A heartbeat: of the run it was assigned while `working_` has it.
  void Beat(const std::string& name) {
    FakeMember& member = members_[name];
    if (member.session == 0) return;
    MemberSaid said{member.session, {}};
    v1::Heartbeat& beat = *said.message.mutable_heartbeat();
    beat.set_sequence(++sequence_);
    if (working_.contains(name)) {
      *beat.mutable_running() = member.Fence();
      *beat.mutable_progress() = working_[name];
    }
    Step(said);
  }
  void Work(const std::string& name, uint64_t step, const std::string& phase) {
    v1::Progress& progress = working_[name];
    progress.set_step(step);
    progress.set_phase(phase);
    progress.set_advances(progress.advances() + 1);
    Beat(name);
  }
  void Idle(const std::string& name) {
    working_.erase(name);
    Beat(name);
  }

  static v1::JobSpec Spec(const std::string& name, uint32_t workers, uint64_t steps = 3) {
    v1::JobSpec spec;
    spec.set_name(name);
    spec.mutable_resources()->set_workers(workers);
    spec.set_steps(steps);
    spec.mutable_timeouts()->set_start_seconds(60);
    spec.mutable_timeouts()->set_step_seconds(30);
    return spec;
  }
  RequestId SubmitJob(const v1::JobSpec& spec, const std::vector<v1::ShardPlan>& plan = {}) {
    const RequestId id = NewRequest();
    Step(Submit{id, spec, plan});
    return id;
  }
  RequestId CancelJob(const std::string& job, bool save = false) {
    const RequestId id = NewRequest();
    Step(Cancel{id, job, save});
    return id;
  }
  // The same with a checkpoint section.
  static v1::JobSpec SavingSpec(const std::string& name, uint32_t workers, uint64_t steps = 100) {
    v1::JobSpec spec = Spec(name, workers, steps);
    spec.mutable_checkpoint()->set_dir("/ckpt");
    spec.mutable_timeouts()->set_collective_seconds(20);
    return spec;
  }
  static Checkpoint From(uint64_t step, const std::string& run_id) {
    Checkpoint from;
    from.resume.set_checkpoint(absl::StrCat("/ckpt/step-", step));
    from.step = step;
    from.run_id = run_id;
    from.dir = "/ckpt";
    return from;
  }
  RequestId SubmitFrom(const v1::JobSpec& spec, const Checkpoint& from) {
    const RequestId id = NewRequest();
    Step(Submit{id, spec, {}, from});
    return id;
  }
  RequestId Arrive(const std::string& name, const std::string& barrier,
                   absl::Duration timeout = absl::Seconds(10)) {
    v1::BarrierRequest body;
    *body.mutable_fence() = members_[name].Fence();
    body.set_name(barrier);
    body.set_timeout_ms(absl::ToInt64Milliseconds(timeout));
    const RequestId id = NewRequest();
    Step(ArriveAtBarrier{id, body});
    return id;
  }
  RequestId Put(const std::string& name, const std::string& key, const std::string& value) {
    v1::PutKeyRequest body;
    *body.mutable_fence() = members_[name].Fence();
    body.set_key(key);
    body.set_value(value);
    const RequestId id = NewRequest();
    Step(PutKey{id, body});
    return id;
  }
  RequestId Get(const std::string& name, const std::string& key,
                absl::Duration timeout = absl::Seconds(5)) {
    v1::GetKeyRequest body;
    *body.mutable_fence() = members_[name].Fence();
    body.set_key(key);
    body.set_timeout_ms(absl::ToInt64Milliseconds(timeout));
    const RequestId id = NewRequest();
    Step(GetKey{id, body});
    return id;
  }
  static v1::StepRecord Record(uint64_t step) {
    v1::StepRecord record;
    record.set_step(step);
    record.set_loss(5.0 / step);
    record.set_tokens(100);
    return record;
  }
  ReportSteps StepsEvent(const std::string& name, uint64_t from, uint64_t to) {
    ReportSteps event{NewRequest(), {}};
    *event.body.mutable_fence() = members_[name].Fence();
    for (uint64_t step = from; step <= to; ++step) *event.body.add_records() = Record(step);
    return event;
  }
  RequestId Steps(const std::string& name, uint64_t from, uint64_t to) {
    const ReportSteps event = StepsEvent(name, from, to);
    Step(event);
    return event.request;
  }
  // A checkpoint that is complete, or with a message abandoned.
  static v1::CheckpointRecord Saved(uint64_t step, const std::string& message = "") {
    v1::CheckpointRecord record;
    record.set_step(step);
    record.set_path(absl::StrCat("/ckpt/step-", step));
    record.set_complete(message.empty());
    record.set_message(message);
    record.set_bytes(1400000000);
    record.set_seconds(1.25);
    record.set_pause_seconds(0.012);
    return record;
  }
  RequestId ReportSaved(const std::string& name, const v1::CheckpointRecord& record) {
    ReportSteps event{NewRequest(), {}};
    *event.body.mutable_fence() = members_[name].Fence();
    *event.body.add_checkpoints() = record;
    if (record.complete()) WriteCheckpoint(members_[name].assign->run_id(), record.step());
    Step(event);
    return event.request;
  }
  // On the disk, whether or not anybody reports it.
  void WriteCheckpoint(const std::string& run_id, uint64_t step) {
    disk_[step] = From(step, run_id);
  }
  std::map<uint64_t, Checkpoint>& disk() { return disk_; }
  const FindNewest& last_look() const { return last_look_; }
  void DamageCheckpoint(uint64_t step) {
    damaged_[step] = absl::StrCat(disk_.at(step).resume.checkpoint(), " has no manifest.json");
    disk_.erase(step);
  }
  // What FindNewest and TruncateHistory are answered with: at once, or when it is asked for. A disk
  // that is not OK is found by nobody.
  void HoldAnswers() { holds_answers_ = true; }
  void AnswerHeld() {
    holds_answers_ = false;
    for (const Event& event : std::exchange(held_, {})) Step(event);
  }
  void BreakDisk(absl::Status status) { disk_status_ = std::move(status); }
  RequestId ReportSample(const std::string& name, uint64_t step, const std::string& prompt,
                         const std::string& text) {
    ReportSteps event{NewRequest(), {}};
    *event.body.mutable_fence() = members_[name].Fence();
    v1::SampleRecord& sample = *event.body.add_samples();
    sample.set_step(step);
    sample.set_prompt(prompt);
    sample.set_text(text);
    Step(event);
    return event.request;
  }
  ReportEnd EndEvent(const std::string& name, const std::string& code = "",
                     const std::string& message = "", std::optional<uint32_t> blamed = {}) {
    ReportEnd event{NewRequest(), {}};
    *event.body.mutable_fence() = members_[name].Fence();
    event.body.set_completed(code.empty());
    event.body.set_error_code(code);
    event.body.set_message(message);
    if (code.empty()) event.body.set_weights_digest("d1");
    if (blamed) event.body.set_blamed_rank(*blamed);
    return event;
  }
  RequestId End(const std::string& name, const std::string& code = "",
                const std::string& message = "", std::optional<uint32_t> blamed = {}) {
    const ReportEnd event = EndEvent(name, code, message, blamed);
    Step(event);
    return event.request;
  }
  RequestId Exit(const std::string& name, int code, int signal) {
    v1::ReportExitRequest body;
    body.set_member(name);
    body.set_pid(members_[name].hello.pid());
    body.set_exit_code(code);
    body.set_signal(signal);
    const RequestId id = NewRequest();
    Step(ReportExit{id, body});
    return id;
  }

  // Submits a job for all of `names`, which are idle, and brings it to RUNNING.
  void StartJob(const v1::JobSpec& spec, const std::vector<std::string>& names) {
    SubmitJob(spec);
    for (const std::string& name : names) Work(name, 0, "loading");
    for (const std::string& name : names) Arrive(name, "start");
  }

  // --- what came of it ---
  bool Answered(RequestId id) const { return replies_.contains(id); }
  const Reply& Answer(RequestId id) const { return replies_.at(id); }
  v1::JobStatus Status(const std::string& job) const {
    const auto status = core_->Status(job, Moment{now_, unix_ms()});
    return status.ok() ? *status : v1::JobStatus();
  }
  bool IsWorking(const std::string& name) const { return working_.contains(name); }
  void Forget(const std::string& name) {
    members_.erase(name);
    working_.erase(name);
  }
  FakeMember& member(const std::string& name) { return members_[name]; }
  bool IsClosed(SessionId session) const { return closed_.contains(session); }
  std::vector<uint64_t> History(const std::string& run_id) const {
    std::vector<uint64_t> steps;
    const auto found = history_.find(run_id);
    if (found == history_.end()) return steps;
    for (const v1::StepRecord& record : found->second) steps.push_back(record.step());
    return steps;
  }
  const std::vector<v1::StepRecord>& HistoryRecords(const std::string& run_id) {
    return history_[run_id];
  }
  const std::vector<v1::SampleRecord>& Samples(const std::string& run_id) {
    return samples_[run_id];
  }
  RequestId NewRequest() { return ++last_request_; }
  int64_t unix_ms() const { return 1767225600000 + absl::ToInt64Milliseconds(now_); }
  Core& core() { return *core_; }
  MemoryLog& log() { return log_; }
  absl::Duration now() const { return now_; }
  const std::vector<Measure>& measures() const { return measures_; }
  // What the service was to do with checkpoint folders, oldest first; whoever answers takes it out.
  std::vector<Action>& snapshot_actions() { return snapshot_actions_; }

 private:
  void Boot() {
    LoadedState state = *log_.Load();
    for (auto& [run_id, job] : state.jobs) {
      for (const v1::SampleRecord& sample : samples_[run_id]) {
        job.sampled[sample.prompt()] = sample.step();
      }
      const auto found = history_.find(run_id);
      if (found == history_.end()) continue;
      for (const v1::StepRecord& record : found->second) {
        if (job.first.step() == 0) job.first = record;
        if (record.step() >= job.job.first_step) job.last = record;
      }
    }
    core_ = std::make_unique<Core>(options_, std::move(state), absl::StrCat("cluster-", ++boots_));
    CarryOut(core_->Start(Moment{now_, unix_ms()}));
  }

  void KeepHistory(const Decision& decision) {
    for (const Action& action : decision.actions) {
      if (const auto* cut = std::get_if<TruncateHistory>(&action)) {
        std::erase_if(history_[cut->run_id],
                      [&](const auto& record) { return record.step() >= cut->first_step; });
        std::erase_if(samples_[cut->run_id],
                      [&](const auto& sample) { return sample.step() >= cut->first_step; });
      } else if (const auto* append = std::get_if<AppendHistory>(&action)) {
        auto& kept = history_[append->run_id];
        kept.insert(kept.end(), append->records.begin(), append->records.end());
      } else if (const auto* samples = std::get_if<AppendSamples>(&action)) {
        auto& kept = samples_[samples->run_id];
        kept.insert(kept.end(), samples->samples.begin(), samples->samples.end());
      }
    }
  }

  void CarryOut(const Decision& decision) {
    (void)log_.Append(decision.records);
    KeepHistory(decision);
    std::vector<Event> answers;
    for (const Action& action : decision.actions) {
      if (const auto* find = std::get_if<FindNewest>(&action)) {
        last_look_ = *find;
        NewestFound found{find->run_id, Newest(*find)};
        for (const auto& [step, what] : damaged_) found.skipped.push_back(what);
        answers.push_back(std::move(found));
      } else if (const auto* cut = std::get_if<TruncateHistory>(&action)) {
        answers.push_back(HistoryTruncated{cut->run_id});
      } else if (const auto* send = std::get_if<SendToSession>(&action)) {
        const auto owner = owners_.find(send->session);
        if (owner == owners_.end()) continue;
        FakeMember& member = members_[owner->second];
        if (member.session != send->session) continue;  // its process is gone
        if (send->message.has_assign()) member.assign = send->message.assign();
        if (!send->message.has_ack() || member.inbox.empty() || !member.inbox.back().has_ack()) {
          member.inbox.push_back(send->message);
        }
      } else if (const auto* close = std::get_if<CloseSession>(&action)) {
        closed_.insert(close->session);
      } else if (const auto* reply = std::get_if<Reply>(&action)) {
        replies_.emplace(reply->request, *reply);
      } else if (const auto* measure = std::get_if<Measure>(&action)) {
        measures_.push_back(*measure);
      } else if (std::holds_alternative<OpenSnapshots>(action) ||
                 std::holds_alternative<BeginSnapshot>(action) ||
                 std::holds_alternative<CompleteSnapshot>(action) ||
                 std::holds_alternative<AbandonSnapshot>(action) ||
                 std::holds_alternative<CloseSnapshots>(action)) {
        snapshot_actions_.push_back(action);
      }
    }
    const int boot = boots_;
    for (const Event& answer : answers) {
      if (boot != boots_) return;  // they went with the process that they were for
      if (holds_answers_) {
        held_.push_back(answer);
      } else {
        Step(answer);
      }
    }
  }

  absl::StatusOr<std::optional<Checkpoint>> Newest(const FindNewest& request) const {
    if (!disk_status_.ok()) return disk_status_;
    std::optional<Checkpoint> newest;
    for (const auto& [step, checkpoint] : disk_) {
      if (checkpoint.run_id != request.run_id || checkpoint.dir != request.dir) continue;
      if (!newest || step <= request.committed_step) newest = checkpoint;
    }
    for (const auto& [step, what] : damaged_) {
      if (newest && step > newest->step) newest->skipped.push_back(what);
    }
    return newest;
  }

  const CoreOptions options_;
  MemoryLog log_;
  std::unique_ptr<Core> core_;
  absl::Duration now_ = absl::Seconds(100);
  std::map<std::string, FakeMember> members_;
  std::map<std::string, v1::Progress> working_;
  std::set<SessionId> closed_;
  std::map<RequestId, Reply> replies_;
  std::map<std::string, std::vector<v1::StepRecord>> history_;
  std::map<std::string, std::vector<v1::SampleRecord>> samples_;
  std::vector<Measure> measures_;
  std::map<uint64_t, Checkpoint> disk_;  // checkpoints by step
  std::map<uint64_t, std::string> damaged_;
  FindNewest last_look_;
  absl::Status disk_status_;
  bool holds_answers_ = false;
  std::vector<Event> held_;
  std::vector<Action> snapshot_actions_;
  std::map<SessionId, std::string> owners_;
  uint64_t events_ = 0;
  uint64_t crash_at_ = 0;
  Crash crash_ = Crash::kBeforeTheLog;
  SessionId last_session_ = 0;
  RequestId last_request_ = 0;
  uint64_t last_incarnation_ = 0;
  uint64_t sequence_ = 0;
  int boots_ = 0;
};

}  // namespace zeroshard::coordinator
