// Offloaded jobs in a Harness: stores that keep the contract of store.proto, workers that commit
// steps, and a checkpoint folder that works.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/spec/job_spec.h"
#include "coordinator/core/stores.h"
#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {

// One job on one store.
struct StoredJob {
  v1::StoreReport report;
  v1::StoreJob job;
  v1::StoreDirective directive;  // the newest that was followed
  std::set<uint32_t> chunks;
  std::vector<uint64_t> applied;  // steps, in the order of the decisions
  std::vector<uint32_t> copied;   // chunks, all ever
  std::optional<v1::SnapshotOrder> order;
};

struct FakeStore {
  std::string incarnation;
  size_t read = 0;  // of its inbox
  std::map<std::string, StoredJob> jobs;
  std::map<std::string, std::string> said;  // by run: the last report
  // What it leaves undone, so that a test can look at the time between.
  bool holds_loading = false;
  bool holds_applying = false;
  bool holds_snapshots = false;
  bool deaf = false;  // it reads nothing
  std::string snapshot_problem;
  std::string load_problem, load_code;
  uint32_t wrong_digest_of = ~0u;  // a chunk
};

class OffloadHarness : public Harness {
 public:
  static CoreOptions SmallChunks() {
    CoreOptions options;
    options.chunk_elements = 4096;
    return options;
  }
  explicit OffloadHarness(CoreOptions options = SmallChunks()) : Harness(options) {}

  // Normalised, of a model with a dozen chunks.
  static v1::JobSpec OffloadSpec(const std::string& name, uint32_t workers, uint64_t steps = 6,
                                 uint32_t replicas = 1) {
    v1::JobSpec spec = Spec(name, workers, steps);
    v1::ModelSpec& model = *spec.mutable_model();
    model.set_architecture("gpt2");
    model.set_hidden_size(32);
    model.set_layers(2);
    model.set_heads(2);
    model.set_sequence_length(32);
    model.set_vocab_size(256);
    spec.mutable_data()->add_train("/data/text");
    spec.mutable_data()->set_tokenizer("bytes");
    spec.set_train_batch_size(4);
    spec.set_train_micro_batch_size_per_gpu(1);
    spec.mutable_optimizer()->set_type("AdamW");
    spec.mutable_bf16()->set_enabled(true);
    spec.mutable_zero_optimization()->set_stage(2);
    spec.mutable_zero_optimization()->mutable_offload_optimizer()->set_device("cpu");
    spec.mutable_store()->set_replicas(replicas);
    const absl::Status normal = NormaliseJobSpec(&spec);
    if (!normal.ok()) spec.set_name(std::string(normal.message()));
    return spec;
  }
  static v1::JobSpec SavedSpec(const std::string& name, uint32_t workers, uint64_t steps,
                               uint64_t interval, uint32_t replicas = 1) {
    v1::JobSpec spec = OffloadSpec(name, workers, steps, replicas);
    spec.mutable_checkpoint()->set_dir("/ckpt");
    spec.mutable_checkpoint()->set_interval_steps(interval);
    return spec;
  }

  FakeStore& Store(const std::string& name) { return stores_[name]; }
  StoredJob& Stored(const std::string& store, const std::string& run) {
    return stores_[store].jobs[run];
  }
  // A new process of that name.
  void StartStore(const std::string& name, const std::string& host = "",
                  uint64_t memory_bytes = 1 << 30, uint64_t nvme_bytes = 0) {
    const bool holds_loading = stores_[name].holds_loading;
    stores_[name] = FakeStore();
    stores_[name].holds_loading = holds_loading;
    JoinStore(name, host.empty() ? absl::StrCat("host-of-", name) : host, memory_bytes, nvme_bytes);
    stores_[name].incarnation = member(name).hello.incarnation();
    Pump();
  }
  void KillStore(const std::string& name) {
    stores_[name].jobs.clear();
    stores_[name].incarnation.clear();
    Exit(name, 0, 9);
    Pump();
  }
  // After a restart of the coordinator, or a broken stream.
  void ReconnectStore(const std::string& name) {
    stores_[name].said.clear();
    stores_[name].read = member(name).inbox.size();
    Connect(name);
    Pump();
  }

  // Everything that follows without anybody's doing.
  void Pump() {
    for (int round = 0; round < 200; ++round) {
      bool moved = AnswerSnapshots();
      for (auto& [name, store] : stores_) {
        if (store.incarnation.empty() || store.deaf) continue;
        moved |= Read(name, store);
        moved |= Report(name, store);
      }
      if (!moved) return;
    }
  }

  void Seal(const std::string& run, uint64_t step) {
    for (auto& [name, store] : stores_) {
      if (store.jobs.contains(run)) SealOn(name, run, step);
    }
    Pump();
  }
  void SealOn(const std::string& name, const std::string& run, uint64_t step) {
    StoredJob& job = stores_[name].jobs[run];
    if (job.report.dropped() || job.report.version().step() + 1 != step) return;
    job.report.set_sealed_step(step);
  }
  CommitStep CommitEvent(const std::string& worker, uint64_t step) {
    CommitStep event{NewRequest(), {}};
    *event.body.mutable_fence() = member(worker).Fence();
    *event.body.mutable_record() = Record(step);
    event.body.set_epoch(member(worker).assign->version().epoch());
    event.body.set_next_sample(4 * step);
    event.body.set_samples(1000);
    return event;
  }
  RequestId Commit(const std::string& worker, uint64_t step) {
    const CommitStep event = CommitEvent(worker, step);
    Step(event);
    Pump();
    return event.request;
  }
  // The worker that has rank 0 of the job.
  std::string Root(const std::string& job) const {
    const v1::JobStatus status = Status(job);
    for (const v1::RankStatus& rank : status.ranks()) {
      if (rank.rank() == 0) return rank.member();
    }
    return "";
  }
  // One whole step, which must be decided.
  v1::StepDecision Train(const std::string& job, uint64_t step) {
    const std::string run = Status(job).run_id();
    Seal(run, step);
    const RequestId request = Commit(Root(job), step);
    v1::StepDecision decision;
    if (Answered(request) && Answer(request).status.ok()) {
      (void)decision.ParseFromString(Answer(request).text);
    }
    return decision;
  }
  void TrainTo(const std::string& job, uint64_t last) {
    for (uint64_t step = Status(job).committed_step() + 1; step <= last; ++step) Train(job, step);
  }
  // The ranks of the open generation begin and meet.
  void BeginRanks(const std::string& job) {
    std::vector<std::string> names;
    const v1::JobStatus status = Status(job);
    for (const v1::RankStatus& rank : status.ranks()) names.push_back(rank.member());
    for (const std::string& name : names) Work(name, 0, "loading");
    for (const std::string& name : names) Arrive(name, "start");
    Pump();
  }
  void Submit1(const v1::JobSpec& spec) {
    SubmitJob(spec);
    Pump();
  }
  void StartOffloaded(const v1::JobSpec& spec) {
    Submit1(spec);
    BeginRanks(spec.name());
  }
  // The worker's process ends and another one takes its name.
  void ReplaceWorker(const std::string& name) {
    Exit(name, 0, 9);
    Idle(name);
    Join(name);
    Pump();
  }
  // Ranks that were told to stop do so.
  void LetGo(const std::vector<std::string>& names) {
    for (const std::string& name : names) Idle(name);
    Pump();
  }
  std::string LastEvents(const std::string& job) const {
    std::string text;
    const v1::JobStatus status = Status(job);
    for (const v1::JobEvent& event : status.events()) {
      absl::StrAppend(&text, event.reason(), "\n");
    }
    return text;
  }

  bool answers_snapshots = true;
  absl::Status open_answer, begin_answer;
  std::string complete_problem;
  std::vector<CompleteSnapshot> completed;
  std::vector<AbandonSnapshot> abandoned;
  std::vector<OpenSnapshots> opened;
  std::set<uint64_t> on_disk;  // steps whose checkpoint is complete
  int closed_folders = 0;

 private:
  bool AnswerSnapshots() {
    if (!answers_snapshots) return false;
    std::vector<Action> actions;
    actions.swap(snapshot_actions());
    for (const Action& action : actions) {
      if (const auto* open = std::get_if<OpenSnapshots>(&action)) {
        opened.push_back(*open);
        Step(SnapshotsOpened{open->run_id, open_answer});
      } else if (const auto* begin = std::get_if<BeginSnapshot>(&action)) {
        absl::StatusOr<std::string> folder = absl::StrCat("/ckpt/.step-", begin->step, ".tmp");
        if (!begin_answer.ok()) folder = begin_answer;
        if (on_disk.contains(begin->step)) folder = absl::AlreadyExistsError("it is complete");
        Step(SnapshotBegun{begin->run_id, begin->step, folder});
      } else if (const auto* complete = std::get_if<CompleteSnapshot>(&action)) {
        completed.push_back(*complete);
        if (complete_problem.empty()) on_disk.insert(complete->step);
        Step(SnapshotCompleted{complete->run_id, complete->step,
                               Saved(complete->step, complete_problem)});
      } else if (const auto* abandon = std::get_if<AbandonSnapshot>(&action)) {
        abandoned.push_back(*abandon);
        Step(SnapshotCompleted{abandon->run_id, abandon->step,
                               Saved(abandon->step, abandon->reason)});
      } else {
        ++closed_folders;
      }
    }
    return !actions.empty();
  }

  bool Read(const std::string& name, FakeStore& store) {
    bool any = false;
    while (store.read < member(name).inbox.size()) {
      const v1::CoordinatorMessage message = member(name).inbox[store.read++];
      any = true;
      if (message.has_welcome()) store.said.clear();
      if (message.has_store()) Follow(store, message.store());
    }
    for (auto& [run, job] : store.jobs) any |= GoOn(store, job);
    return any;
  }

  static bool Follow(FakeStore& store, const v1::StoreDirective& directive) {
    StoredJob& stored = store.jobs[directive.run_id()];
    v1::StoreReport& report = stored.report;
    report.set_run_id(directive.run_id());
    if (directive.term() < report.term() || report.dropped()) return false;
    if (directive.drop()) {
      v1::StoreReport last;
      last.set_run_id(directive.run_id());
      last.set_term(directive.term());
      last.set_generation(std::max(directive.generation(), report.generation()));
      last.set_dropped(true);
      report = last;
      return true;
    }
    if (directive.generation() < report.generation() ||
        directive.epoch() < report.version().epoch()) {
      return false;
    }
    const bool fresh = report.phase() == v1::STORE_PHASE_UNSPECIFIED;
    const bool moved = fresh || directive.epoch() != report.version().epoch() ||
                       directive.map_version() != report.map_version();
    if (moved && !directive.has_job()) return false;
    report.set_term(directive.term());
    if (moved) {
      const bool again = fresh || directive.epoch() != report.version().epoch() ||
                         report.phase() == v1::STORE_PHASE_FAILED;
      const std::set<uint32_t> before = again ? std::set<uint32_t>() : stored.chunks;
      stored.job = directive.job();
      const v1::StoreMap& map = stored.job.map();
      stored.chunks.clear();
      for (int place = 0; place < map.placement_size(); ++place) {
        if (map.placement(place) == stored.job.store()) {
          stored.chunks.insert(static_cast<uint32_t>(place) / map.replicas());
        }
      }
      const uint64_t here = again ? (stored.job.copies().empty() ? stored.job.base().step()
                                                                 : stored.job.copy().step())
                                  : report.version().step();
      for (const auto& copy : stored.job.copies()) stored.copied.push_back(copy.chunk());
      report.set_map_version(directive.map_version());
      report.mutable_version()->set_epoch(directive.epoch());
      report.mutable_version()->set_step(here);
      report.clear_problem();
      report.clear_error_code();
      report.clear_chunk_digests();
      report.set_sealed_step(0);
      if (again || before != stored.chunks) report.set_phase(v1::STORE_PHASE_LOADING);
    }
    stored.directive = directive;
    if (directive.generation() > report.generation()) {
      report.set_generation(directive.generation());
      report.set_sealed_step(0);
    }
    if (!directive.has_snapshot()) {
      report.clear_snapshot();
      stored.order.reset();
    } else if (!stored.order ||
               stored.order->SerializeAsString() != directive.snapshot().SerializeAsString()) {
      report.clear_snapshot();
      stored.order = directive.snapshot();
    }
    return true;
  }

  static bool GoOn(FakeStore& store, StoredJob& stored) {
    v1::StoreReport& report = stored.report;
    const std::string before = report.SerializeAsString();
    if (report.phase() == v1::STORE_PHASE_LOADING && !store.holds_loading) {
      if (store.load_problem.empty()) {
        report.set_phase(v1::STORE_PHASE_READY);
      } else {
        report.set_phase(v1::STORE_PHASE_FAILED);
        report.set_problem(store.load_problem);
        report.set_error_code(store.load_code);
      }
      report.set_progress(report.progress() + 1);
    }
    const v1::StepDecision& decision = stored.directive.decision();
    if (report.phase() == v1::STORE_PHASE_READY && decision.step() == report.version().step() + 1) {
      if (!decision.skip() && report.sealed_step() != decision.step()) {
        report.set_phase(v1::STORE_PHASE_FAILED);
        report.set_problem("a decision without all gradients");
        report.set_error_code("DATA_LOSS");
      } else {
        report.set_phase(v1::STORE_PHASE_APPLYING);
        report.set_sealed_step(0);
      }
    }
    if (report.phase() == v1::STORE_PHASE_APPLYING && !store.holds_applying) {
      report.set_phase(v1::STORE_PHASE_READY);
      report.mutable_version()->set_step(decision.step());
      *report.mutable_decision() = decision;
      report.set_progress(report.progress() + 1);
      stored.applied.push_back(decision.step());
      report.clear_chunk_digests();
      for (const uint32_t chunk : stored.chunks) {
        report.add_chunk_digests(1000 * static_cast<uint32_t>(decision.step()) + chunk +
                                 (chunk == store.wrong_digest_of ? 7 : 0));
      }
    }
    if (stored.order && !report.has_snapshot() && !store.holds_snapshots &&
        report.phase() == v1::STORE_PHASE_READY &&
        report.version().step() >= stored.order->step()) {
      v1::SnapshotReport& snapshot = *report.mutable_snapshot();
      snapshot.set_step(stored.order->step());
      snapshot.set_done(true);
      snapshot.set_problem(store.snapshot_problem);
      snapshot.set_file(absl::StrCat("state-", stored.order->index()));
    }
    if (stored.directive.digest_step() != 0 && report.phase() == v1::STORE_PHASE_READY &&
        report.version().step() == stored.directive.digest_step()) {
      report.set_digest_step(stored.directive.digest_step());
      const uint32_t replicas = stored.job.map().replicas();
      report.set_digest_low(0);
      for (int place = 0; place < stored.job.map().placement_size();
           place += static_cast<int>(replicas)) {
        if (stored.job.map().placement(place) != stored.job.store()) continue;
        report.set_digest_low(report.digest_low() + (uint64_t{1} << (place / replicas)));
      }
      report.set_digest_high(0);
    }
    return report.SerializeAsString() != before;
  }

  bool Report(const std::string& name, FakeStore& store) {
    bool any = false;
    if (member(name).session == 0) return false;
    for (auto& [run, job] : store.jobs) {
      if (job.report.run_id().empty()) continue;
      const std::string text = job.report.SerializeAsString();
      if (store.said[run] == text) continue;
      store.said[run] = text;
      any = true;
      MemberSaid said{member(name).session, {}};
      *said.message.mutable_store() = job.report;
      Step(said);
    }
    return any;
  }

  std::map<std::string, FakeStore> stores_;
};

}  // namespace zeroshard::coordinator
