#include "tests/simulator/invariants.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "coordinator/core/text.h"
#include "tests/simulator/cluster.h"
#include "tests/simulator/sim_coordinator.h"
#include "tests/simulator/sim_store.h"

namespace zeroshard::simulator {

using coordinator::CoreOptions;
using coordinator::CounterRecord;
using coordinator::JobRecord;
using coordinator::LogRecord;
using coordinator::StepDecisionRecord;
using coordinator::StoreMapRecord;

namespace {

constexpr absl::string_view kCannotLoad = "cannot load its part of the job";

}  // namespace

void Invariants::Violate(const std::string& invariant, const std::string& what) {
  cluster_->world().Violate(invariant, what);
}

void Invariants::OnRecords(const std::vector<LogRecord>& records) {
  for (const LogRecord& record : records) {
    if (const auto* counter = std::get_if<CounterRecord>(&record)) On(*counter);
    if (const auto* job = std::get_if<JobRecord>(&record)) On(*job);
    if (const auto* map = std::get_if<StoreMapRecord>(&record)) On(*map);
    if (const auto* decision = std::get_if<StepDecisionRecord>(&record)) On(*decision);
  }
}

void Invariants::On(const CounterRecord& record) {
  if (record.name != "term") return;
  if (record.value <= term_) Violate("I9", absl::StrCat("term ", record.value, " after ", term_));
  term_ = record.value;
}

void Invariants::On(const JobRecord& record) {
  Run& run = runs_[record.run_id];
  run.job = record.spec.name();
  if (record.generation < run.generation) {
    Violate("I9", absl::StrCat(record.run_id, ": generation ", record.generation, " after ",
                               run.generation));
  }
  if (record.state == v1::JOB_STATE_RECOVERING && run.state != v1::JOB_STATE_RECOVERING) {
    ++recoveries_;
  }
  if (coordinator::IsEnded(run.state) && record.state != run.state) {
    Violate("states", absl::StrCat(record.run_id, " leaves its end for ",
                                   coordinator::NameOfState(record.state)));
  }
  if (record.state == v1::JOB_STATE_FAILED && run.state != record.state &&
      absl::StrContains(record.reason, kCannotLoad)) {
    CheckNoRoom(record);
  }
  if (record.first_step != run.first_step) {
    ++went_back_;
    if (record.first_step < run.first_step) {
      Violate("I9",
              absl::StrCat(record.run_id, ": goes on at step ", record.first_step, " from ",
                           record.resume.checkpoint(), " after it began at step ", run.first_step));
    }
    run.first_step = record.first_step;
  }
  run.generation = record.generation;
  run.state = record.state;
}

void Invariants::OnHistory(const std::string& run_id, uint64_t step) {
  Run& run = runs_[run_id];
  if (step <= run.furthest) return;
  run.furthest = step;
  run.faults = faults_;
}

// A job that ends because a store takes none of its state has no other store to go to: each is
// gone, leaves, was told to forget it, or has refused it too.
void Invariants::CheckNoRoom(const JobRecord& record) {
  for (const auto& [name, process] : cluster_->members()) {
    const auto* store = dynamic_cast<const SimStore*>(process.get());
    if (store == nullptr || !store->alive() || store->refused()) continue;
    const coordinator::Member* member = cluster_->coordinator().core().members().Find(name);
    if (member == nullptr || member->hello.incarnation() != store->hello().incarnation()) continue;
    if (member->lost || member->session == 0 || member->leaving) continue;
    const SimStore::Job* job = store->Find(record.run_id);
    if (job != nullptr && job->control.dropped()) continue;
    Violate("room", absl::StrCat(record.run_id, " ends though ", name,
                                 " could take its state: ", record.reason));
  }
}

void Invariants::On(const StoreMapRecord& record) {
  Run& run = runs_[record.run_id];
  const v1::StateVersion& base = record.job.base();
  if (run.mapped && base.epoch() < run.epoch) {
    Violate("I9", absl::StrCat(record.run_id, ": epoch ", base.epoch(), " after ", run.epoch));
  }
  if (run.mapped && record.map_version < run.map_version) {
    Violate("I9",
            absl::StrCat(record.run_id, ": map ", record.map_version, " after ", run.map_version));
  }
  if (!run.mapped || base.epoch() != run.epoch) {
    const auto folder = cluster_->disk().folders.find(record.job.checkpoint());
    const bool complete = folder != cluster_->disk().folders.end() && folder->second.complete &&
                          folder->second.step == base.step();
    if (base.step() != 0 || !record.job.checkpoint().empty()) {
      if (!complete) {
        Violate("I7", absl::StrCat(record.run_id, ": epoch ", base.epoch(), " begins at step ",
                                   base.step(), " from ", record.job.checkpoint(),
                                   ", which is not complete"));
      }
    }
    if (run.mapped) {
      ++rollbacks_;
      CheckLost(run);
      CheckLeft(run, base.step());
      if (base.step() > run.committed) {
        Violate("I7", absl::StrCat(record.run_id, ": goes back to step ", base.step(), " from ",
                                   run.committed));
      }
    }
    run.committed = base.step();
  }
  run.mapped = true;
  run.epoch = base.epoch();
  run.map_version = record.map_version;
  run.map = record;
}

// A step is given up only where some chunk was on lost stores alone.
void Invariants::CheckLost(const Run& run) {
  const v1::StoreMap& map = run.map.job.map();
  const auto& fences = cluster_->coordinator().core().members().fences();
  const auto holds = [&](uint32_t index, uint32_t chunk) {
    if (index == store::kNoStore) return false;
    const std::string& incarnation = map.stores(static_cast<int>(index)).incarnation();
    const std::shared_ptr<SimStore> store = cluster_->StoreOf(incarnation);
    if (store == nullptr || !store->alive() || fences.contains(incarnation)) return false;
    if (store->let_go()) return false;
    const SimStore::Job* job = store->Find(run.map.run_id);
    if (job == nullptr) return false;
    const v1::StoreReport& report = job->control.report();
    // Who was told to go back could not know yet of what was copied just now, from a store that
    // lives on although it counts as lost.
    const auto& copies = job->control.job().copies();
    const bool copied = std::any_of(copies.begin(), copies.end(),
                                    [&](const auto& copy) { return copy.chunk() == chunk; });
    if (copied && cluster_->world().now() - job->ready_at < CoreOptions().member_timeout) {
      return false;
    }
    return report.version().epoch() == run.epoch && report.map_version() == run.map_version &&
           (report.phase() == v1::STORE_PHASE_READY ||
            report.phase() == v1::STORE_PHASE_APPLYING) &&
           job->state.contains(chunk);
  };
  bool copying = false;
  for (const v1::StoreMap::Store& where : map.stores()) {
    const std::shared_ptr<SimStore> store = cluster_->StoreOf(where.incarnation());
    if (store == nullptr || !store->alive() || fences.contains(where.incarnation())) continue;
    const SimStore::Job* job = store->Find(run.map.run_id);
    copying |= job != nullptr && job->control.report().phase() == v1::STORE_PHASE_LOADING &&
               !job->control.job().copies().empty();
  }
  cut_copies_ += copying ? 1 : 0;
  const auto chunks = static_cast<uint32_t>(map.placement_size()) / map.replicas();
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    bool held = false;
    for (uint32_t i = 0; i < map.replicas(); ++i) {
      held |= holds(map.placement(static_cast<int>(chunk * map.replicas() + i)), chunk);
    }
    if (!held) return;
  }
  Violate("I7", absl::StrCat(run.map.run_id, ": goes back from step ", run.committed,
                             " though every chunk is on a live store"));
}

// Stores that were let go, and none besides, are gone: what they held alone was saved.
void Invariants::CheckLeft(const Run& run, uint64_t base) {
  const auto& fences = cluster_->coordinator().core().members().fences();
  bool any = false;
  for (const v1::StoreMap::Store& where : run.map.job.map().stores()) {
    const std::shared_ptr<SimStore> store = cluster_->StoreOf(where.incarnation());
    if (store == nullptr) return;
    any |= store->let_go();
    if (!store->let_go() && (!store->alive() || fences.contains(where.incarnation()))) return;
  }
  const bool saves = !cluster_->reference(run.job).spec().checkpoint().dir().empty();
  if (!any || !saves || cluster_->WasFull(run.job)) return;
  if (base == run.committed) {
    ++left_;
    return;
  }
  Violate("leaving", absl::StrCat(run.map.run_id, ": goes back from step ", run.committed, " to ",
                                  base, " though every store that is gone was let go"));
}

void Invariants::On(const StepDecisionRecord& record) {
  Run& run = runs_[record.run_id];
  const v1::StepDecision& decision = record.decision;
  const std::pair<uint64_t, uint64_t> key{decision.epoch(), decision.step()};
  const std::string bytes = decision.SerializeAsString();
  const auto [before, first] = run.decided.emplace(key, bytes);
  if (!first) {
    if (before->second != bytes) {
      Violate("I2", absl::StrCat(record.run_id, ": step ", decision.step(), " of epoch ",
                                 decision.epoch(), " is decided twice"));
    }
    return;  // written down again
  }
  ++decisions_;
  if (decision.epoch() != run.epoch || decision.step() != run.committed + 1) {
    Violate("I9",
            absl::StrCat(record.run_id, ": step ", decision.step(), " of epoch ", decision.epoch(),
                         " is decided after step ", run.committed, " of epoch ", run.epoch));
  }
  v1::StepDecision wanted = cluster_->reference(run.job).Decision(decision.step());
  wanted.set_epoch(decision.epoch());
  wanted.set_generation(run.generation);
  wanted.set_snapshot(decision.snapshot());
  if (wanted.SerializeAsString() != bytes) {
    Violate("I11", absl::StrCat("decided {", decision.ShortDebugString(), "}, wanted {",
                                wanted.ShortDebugString(), "}"));
  }
  CheckFullyStaged(run, decision);
  run.committed = decision.step();
  run.faults = faults_;
}

void Invariants::CheckFullyStaged(const Run& run, const v1::StepDecision& decision) {
  const v1::StoreMap& map = run.map.job.map();
  std::set<uint32_t> used(map.placement().begin(), map.placement().end());
  for (const uint32_t index : used) {
    if (index == store::kNoStore) continue;
    const v1::StoreMap::Store& where = map.stores(static_cast<int>(index));
    const std::shared_ptr<SimStore> store = cluster_->StoreOf(where.incarnation());
    if (store == nullptr) {
      Violate("map", absl::StrCat("names ", where.member(), " ", where.incarnation()));
      return;
    }
    const SimStore::Job* job = store->Find(run.map.run_id);
    const v1::StoreReport* report = job == nullptr ? nullptr : &job->control.report();
    if (report == nullptr || report->version().epoch() != decision.epoch() ||
        report->version().step() + 1 != decision.step() ||
        report->phase() != v1::STORE_PHASE_READY) {
      Violate("I1",
              absl::StrCat("step ", decision.step(), " is decided with ", where.member(), " at ",
                           report == nullptr ? "nothing" : report->ShortDebugString()));
      return;
    }
    if (report->sealed_step() != decision.step() || report->generation() != decision.generation()) {
      Violate("I3",
              absl::StrCat("step ", decision.step(), " of generation ", decision.generation(),
                           " is decided; ", where.member(), ": ", job->control.MissingGradients(),
                           ", generation ", report->generation()));
      return;
    }
  }
}

void Invariants::OnAssign(const v1::Assign& assign) {
  if (!assign.has_stores()) return;
  if (assign.evaluate()) {
    const std::vector<v1::StepRecord>& history = cluster_->disk().histories[assign.run_id()];
    if (!cluster_->reference(assign.job()).Evaluates(assign.first_step() - 1) ||
        (!history.empty() && history.back().step() >= assign.first_step() - 1)) {
      Violate("evaluation", absl::StrCat("step ", assign.first_step() - 1, " of ", assign.run_id(),
                                         " is to be evaluated again"));
    }
    made_up_ += assign.rank() == 0 ? 1 : 0;
  }
  for (const v1::StoreMap::Store& where : assign.stores().stores()) {
    const std::shared_ptr<SimStore> store = cluster_->StoreOf(where.incarnation());
    if (store == nullptr || !store->alive()) continue;
    bool used = false;
    const auto& map = assign.stores();
    for (const uint32_t index : map.placement()) {
      used |= index < static_cast<uint32_t>(map.stores_size()) &&
              map.stores(static_cast<int>(index)).incarnation() == where.incarnation();
    }
    if (!used) continue;
    const SimStore::Job* job = store->Find(assign.run_id());
    if (job != nullptr && job->control.generation() >= assign.generation()) continue;
    Violate("I4", absl::StrCat("rank ", assign.rank(), " is assigned in generation ",
                               assign.generation(), ", which ", where.member(), " has not opened"));
  }
}

void Invariants::OnApply(const std::string& incarnation, const std::string& run_id, uint64_t load,
                         const v1::StepDecision& decision) {
  const std::string key = absl::StrCat(incarnation, " ", run_id, " ", load, " ", decision.epoch(),
                                       " ", decision.step());
  if (!applied_.insert(key).second) Violate("I2", absl::StrCat("applied twice: ", key));
}

void Invariants::OnCompute(
    const std::string& job, const std::string& who, uint64_t epoch, uint64_t step,
    const std::map<uint32_t, std::pair<v1::StateVersion, uint64_t>>& chunks) {
  const Reference& reference = cluster_->reference(job);
  for (uint32_t chunk = 0; chunk < reference.table().chunks.size(); ++chunk) {
    const auto found = chunks.find(chunk);
    if (found == chunks.end()) {
      return Violate("I5", absl::StrCat(who, " has no chunk ", chunk, " of step ", step));
    }
    const auto& [version, state] = found->second;
    if (version.epoch() != epoch || version.step() != step ||
        state != reference.State(step)[chunk]) {
      return Violate(
          "I5", absl::StrCat(who, " computes on step ", step, " of epoch ", epoch, ", but chunk ",
                             chunk, " is of ", version.ShortDebugString(),
                             state == reference.State(step)[chunk] ? "" : ", other bits"));
    }
  }
}

void Invariants::Check() {
  for (const auto& [name, process] : cluster_->members()) {
    const auto* store = dynamic_cast<const SimStore*>(process.get());
    if (store == nullptr) continue;
    for (const auto& [run_id, job] : store->jobs()) {
      const v1::StoreReport& report = job->control.report();
      Counters& seen = stores_[{store->hello().incarnation(), run_id}];
      const Counters now{report.term(), report.generation(), report.version().epoch(),
                         report.map_version(), report.version().step()};
      if (report.dropped()) continue;
      // Nothing here damages what a store holds: another store may not answer, or its disk is full.
      const bool full = store->refused() && report.error_code() == "RESOURCE_EXHAUSTED";
      if (report.phase() == v1::STORE_PHASE_FAILED && report.error_code() != "UNAVAILABLE" &&
          !full) {
        return Violate("I3", absl::StrCat(name, ", ", run_id, " fails: ", report.problem()));
      }
      if (now.term < seen.term || now.generation < seen.generation || now.epoch < seen.epoch ||
          (now.epoch == seen.epoch &&
           (now.map_version < seen.map_version || now.step < seen.step))) {
        return Violate("I9",
                       absl::StrCat(name, ", ", run_id, " goes back: ", report.ShortDebugString()));
      }
      seen = now;
      const auto found = runs_.find(run_id);
      if (found == runs_.end()) continue;
      const Run& run = found->second;
      const bool settled =
          report.phase() == v1::STORE_PHASE_READY || report.phase() == v1::STORE_PHASE_APPLYING;
      if (settled && now.epoch == run.epoch && now.map_version == run.map_version &&
          !coordinator::IsEnded(run.state)) {
        bool mapped = false;  // this very process
        for (const v1::StoreMap::Store& where : run.map.job.map().stores()) {
          mapped |= where.incarnation() == store->hello().incarnation();
        }
        if (mapped && now.step != run.committed && now.step + 1 != run.committed) {
          return Violate("I1", absl::StrCat(name, ", ", run_id, " is at step ", now.step,
                                            "; committed is ", run.committed));
        }
      }
      if (report.phase() != v1::STORE_PHASE_READY) continue;
      const Reference& reference = cluster_->reference(run.job);
      for (const auto& [chunk, state] : job->state) {
        if (state == reference.State(now.step)[chunk]) continue;
        return Violate("I8", absl::StrCat(name, ", ", run_id, ": chunk ", chunk, " at step ",
                                          now.step, " is not what an undisturbed run has"));
      }
    }
  }
}

void Invariants::CheckEnd(const v1::JobStatus& status) {
  const Reference& reference = cluster_->reference(status.name());
  if (status.state() == v1::JOB_STATE_FAILED &&
      faults_ - runs_[status.run_id()].faults >= kGivesUp &&
      absl::StrContains(status.reason(), "recoveries in a row")) {
    ++given_up_;
    return;
  }
  if (status.state() == v1::JOB_STATE_FAILED && absl::StrContains(status.reason(), kCannotLoad)) {
    ++refused_;  // whether it had to was seen when it ended
    return;
  }
  if (status.state() != v1::JOB_STATE_COMPLETED) {
    return Violate(
        "end", absl::StrCat(status.run_id(), " is ", coordinator::NameOfState(status.state()), ": ",
                            status.reason()));
  }
  if (status.weights_digest() != reference.Digest()) {
    Violate("end", absl::StrCat(status.run_id(), " has weights ", status.weights_digest(),
                                ", wanted ", reference.Digest()));
  }
  if (status.committed_step() != reference.spec().steps()) {
    Violate("end", absl::StrCat(status.run_id(), " committed ", status.committed_step(), " of ",
                                reference.spec().steps()));
  }
  CheckHistory(status);
}

void Invariants::CheckHistory(const v1::JobStatus& status) {
  const Reference& reference = cluster_->reference(status.name());
  const std::vector<v1::StepRecord>& history = cluster_->disk().histories[status.run_id()];
  const bool lacks =
      std::any_of(status.events().begin(), status.events().end(), [](const v1::JobEvent& event) {
        return absl::StrContains(event.reason(), "the history lacks");
      });
  unreported_ += lacks ? 1 : 0;
  if (history.size() != reference.spec().steps() && !lacks) {
    return Violate("end", absl::StrCat("the history of ", status.run_id(), " has ", history.size(),
                                       " steps of ", reference.spec().steps()));
  }
  uint64_t steps_lost = 0;
  for (const v1::StepRecord& record : history) {
    const v1::StepRecord& wanted = reference.Record(record.step());
    steps_lost += record.steps_lost();
    if (record.loss() != wanted.loss() || record.grad_norm() != wanted.grad_norm() ||
        record.tokens() != wanted.tokens()) {
      Violate("end", absl::StrCat("the history of ", status.run_id(), " says of step ",
                                  record.step(), " ", record.ShortDebugString()));
    }
    const bool due = reference.Evaluates(record.step());
    if (due && !record.has_eval_loss()) {
      const std::string words =
          absl::StrCat("after step ", record.step(), " is left out of the history");
      const bool said = std::any_of(
          status.events().begin(), status.events().end(),
          [&](const v1::JobEvent& event) { return absl::StrContains(event.reason(), words); });
      left_out_ += said ? 1 : 0;
      if (said) continue;
    } else if (due == record.has_eval_loss() &&
               (!due ||
                record.eval_loss() == Reference::EvalLoss(reference.State(record.step())))) {
      continue;
    }
    Violate("evaluation", absl::StrCat("the history of ", status.run_id(), " says of step ",
                                       record.step(), " ", record.ShortDebugString(),
                                       due ? ", whose loss is due" : ", whose loss is not due"));
  }
  if (steps_lost != status.steps_lost()) {
    Violate("end", absl::StrCat("the history of ", status.run_id(), " tells of ", steps_lost,
                                " steps lost, its status of ", status.steps_lost()));
  }
}

}  // namespace zeroshard::simulator
