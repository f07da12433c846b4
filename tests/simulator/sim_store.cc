#include "tests/simulator/sim_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "coordinator/core/run.h"

namespace zeroshard::simulator {

const SimStore::Job* SimStore::Find(const std::string& run_id) const {
  const auto found = jobs_.find(run_id);
  return found == jobs_.end() ? nullptr : found->second.get();
}

void SimStore::Violate(const std::string& invariant, const Job& job, const std::string& what) {
  cluster_->world().Violate(invariant,
                            absl::StrCat(name(), ", ", job.control.report().run_id(), ": ", what));
}

void SimStore::Work(Job& job, absl::Duration delay, std::function<void(Job&)> what) {
  After(delay,
        [this, run_id = job.control.report().run_id(), work = job.work, what = std::move(what)] {
          const auto found = jobs_.find(run_id);
          if (found == jobs_.end() || found->second->work != work) return;
          what(*found->second);
        });
}

void SimStore::AskToLeave() {
  if (leaving_) return;
  cluster_->world().Trace(absl::StrCat(name(), " is asked to leave"));
  leaving_ = true;
  leaves_.set_phase(coordinator::kLeavingPhase);
}

void SimStore::OnMessage(const v1::CoordinatorMessage& message) {
  if (message.has_welcome()) {
    for (auto& [run_id, job] : jobs_) {
      job->sent.clear();
      Settle(*job);
    }
  } else if (message.has_refused()) {
    // One that hears and answers gets on, or says why not, before anybody loses patience with it.
    if (absl::StrContains(message.refused().reason(), "did not get on with") &&
        cluster_->world().now() - paused_until_ > absl::Minutes(2)) {
      cluster_->world().Violate(
          "fence", absl::StrCat(name(), " is well and was fenced: ", message.refused().reason()));
    }
    if (message.refused().fenced()) cluster_->Reincarnate(shared_from_this());
  } else if (message.has_stop() && message.stop().run_id().empty() && leaving_ && !let_go_) {
    cluster_->world().Trace(absl::StrCat(name(), " may go"));
    let_go_ = true;
    v1::MemberMessage goodbye;
    goodbye.mutable_goodbye()->set_reason("told to leave");
    Send(std::move(goodbye));
    After(cluster_->world().Between(absl::Milliseconds(1), absl::Milliseconds(500)),
          [this] { cluster_->Leave(shared_from_this()); });
  } else if (message.has_store()) {
    OnDirective(message.store());
    // Handed over once more by a stream that was slow to end.
    if (cluster_->world().Chance(5)) {
      After(cluster_->world().Between(absl::Milliseconds(1), absl::Seconds(20)),
            [this, directive = message.store()] { OnLateDirective(directive); });
    }
  }
}

void SimStore::OnDirective(const v1::StoreDirective& directive) {
  std::unique_ptr<Job>& job = jobs_[directive.run_id()];
  if (job == nullptr) job = std::make_unique<Job>(directive.run_id());
  const absl::StatusOr<store::Orders> orders =
      job->control.OnDirective(directive, hello().incarnation());
  if (!orders.ok()) {
    cluster_->world().Trace(absl::StrCat(name(), " refuses: ", orders.status().ToString()));
    if (absl::IsInvalidArgument(orders.status())) {
      Violate("directive", *job, orders.status().ToString());
    }
    job->sent.clear();
  } else {
    CarryOut(*job, *orders);
  }
  Settle(*job);
}

void SimStore::OnLateDirective(const v1::StoreDirective& late) {
  const auto found = jobs_.find(late.run_id());
  if (found == jobs_.end()) return;
  store::JobControl& control = found->second->control;
  const v1::StoreReport& report = control.report();
  const bool older =
      late.term() < report.term() ||
      (!late.drop() &&
       (report.dropped() || late.generation() < report.generation() ||
        late.epoch() < control.epoch() ||
        (late.epoch() == control.epoch() && late.map_version() < report.map_version())));
  if (!older || report.phase() == v1::STORE_PHASE_UNSPECIFIED) return;
  if (control.OnDirective(late, hello().incarnation()).ok()) {
    Violate("I9", *found->second,
            absl::StrCat("follows an old directive: ", late.generation(), " ", late.epoch(), " ",
                         late.map_version()));
  }
}

void SimStore::CarryOut(Job& job, const store::Orders& orders) {
  if (orders.forget) {
    ++job.work;
    ++job.snapshot;
    job.state.clear();
    job.staging.clear();
  }
  if (orders.load) Load(job, orders.keep);
  if (orders.drop_staging) {
    if (job.control.report().phase() == v1::STORE_PHASE_APPLYING) {
      Violate("I3", job, "drops what it is applying");
    }
    job.staging.clear();
  }
  if (orders.cancel_snapshot) ++job.snapshot;
  if (orders.snapshot) WriteSnapshot(job, *orders.snapshot);
  if (orders.apply) Apply(job, *orders.apply);
  if (orders.digest_step) Digest(job, *orders.digest_step);
}

// --- loading ------------------------------------------------------------------------------------

void SimStore::Load(Job& job, const std::vector<uint32_t>& keep) {
  ++job.work;
  ++job.snapshot;
  ++job.loads;
  job.unapplied.clear();
  std::map<uint32_t, uint64_t> state;
  std::vector<uint32_t> left;
  for (const auto& [number, chunk] : job.control.chunks()) {
    if (std::find(keep.begin(), keep.end(), number) == keep.end()) {
      left.push_back(number);
    } else if (job.state.contains(number)) {
      state[number] = job.state[number];
    } else {
      Violate("keep", job, absl::StrCat("is to keep chunk ", number, ", which is not here"));
    }
  }
  job.state = std::move(state);
  job.kept = keep;
  job.staging.clear();
  LoadNext(job, std::move(left), cluster_->world().now());
}

void SimStore::LoadNext(Job& job, std::vector<uint32_t> left, absl::Duration since) {
  World& world = cluster_->world();
  if (left.empty()) {
    Work(job, world.Between(absl::Milliseconds(1), absl::Seconds(2)), [this](Job& job) {
      job.ready_at = cluster_->world().now();
      CarryOut(job, job.control.OnLoaded(absl::OkStatus()));
      Settle(job);
    });
    return;
  }
  Work(job, world.Between(absl::Microseconds(100), absl::Seconds(1)),
       [this, left, since](Job& job) {
         const uint32_t chunk = left.back();
         std::vector<uint32_t> rest = left;
         const v1::StoreJob& what = job.control.job();
         const auto fail = [&](const absl::Status& status) {
           cluster_->world().Trace(
               absl::StrCat(name(), " cannot load chunk ", chunk, ": ", status.ToString()));
           ++job.work;
           CarryOut(job, job.control.OnLoaded(status));
           Settle(job);
         };
         if (!cluster_->DiskTakes(name())) {
           refused_ = true;
           return fail(absl::ResourceExhaustedError("no space left on device"));
         }
         for (const v1::StoreJob::Copy& copy : what.copies()) {
           if (copy.chunk() != chunk) continue;
           const v1::StoreMap::Store& peer = what.map().stores(static_cast<int>(copy.from_store()));
           const std::shared_ptr<SimStore> from = cluster_->FindStore(peer.member());
           absl::StatusOr<uint64_t> state =
               absl::UnavailableError(absl::StrCat(peer.member(), " does not answer"));
           if (from != nullptr && from->hello().incarnation() == peer.incarnation() &&
               from->paused_until() <= cluster_->world().now()) {
             state = from->Copy(job.control.report().run_id(), what.copy(), chunk);
           }
           if (state.ok()) {
             job.state[chunk] = *state;
             rest.pop_back();
           } else if (absl::IsNotFound(state.status()) ||
                      cluster_->world().now() - since > patience_) {
             return fail(absl::UnavailableError(state.status().message()));
           }
           return LoadNext(job, std::move(rest), since);
         }
         const std::string job_name = what.job();
         const uint64_t step = what.base().step();
         if (what.checkpoint().empty()) {
           if (step != 0)
             return fail(absl::NotFoundError(absl::StrCat("no checkpoint of step ", step)));
           job.state[chunk] = cluster_->reference(job_name).State(0)[chunk];
         } else {
           const auto found = cluster_->disk().folders.find(what.checkpoint());
           if (found == cluster_->disk().folders.end() || !found->second.complete ||
               found->second.step != step) {
             Violate("I7", job, absl::StrCat("is to load ", what.checkpoint(), " as step ", step));
             return fail(absl::DataLossError("not a complete checkpoint"));
           }
           job.state[chunk] = found->second.chunks.at(chunk);
         }
         job.control.OnProgress();
         rest.pop_back();
         LoadNext(job, std::move(rest), since);
         Settle(job);
       });
}

absl::StatusOr<uint64_t> SimStore::Copy(const std::string& run_id, const v1::StateVersion& version,
                                        uint32_t chunk) const {
  const Job* job = Find(run_id);
  if (job == nullptr) return absl::NotFoundError(absl::StrCat(name(), " has nothing of it"));
  const v1::StoreReport& report = job->control.report();
  // Two stores may copy from each other.
  const bool here = report.phase() == v1::STORE_PHASE_READY ||
                    (report.phase() == v1::STORE_PHASE_LOADING &&
                     std::find(job->kept.begin(), job->kept.end(), chunk) != job->kept.end());
  if (!here || report.version().epoch() != version.epoch() ||
      report.version().step() != version.step() || !job->state.contains(chunk)) {
    return absl::UnavailableError(absl::StrCat(name(), " is at step ", report.version().step(),
                                               " of epoch ", report.version().epoch()));
  }
  return job->state.at(chunk);
}

// --- a step -------------------------------------------------------------------------------------

void SimStore::Apply(Job& job, const v1::StepDecision& decision) {
  const std::string& run_id = job.control.report().run_id();
  cluster_->invariants().OnApply(hello().incarnation(), run_id, job.loads, decision);
  std::map<uint32_t, uint64_t> gradients;
  std::vector<uint32_t> left;
  for (auto it = job.control.chunks().rbegin(); it != job.control.chunks().rend(); ++it) {
    const auto& [number, chunk] = *it;
    if (!chunk.trained) continue;
    left.push_back(number);
    if (decision.skip()) continue;
    uint64_t next = 0;
    for (const auto& [begin, staged] : job.staging[number]) {
      if (begin != next) {
        Violate("I6", job, absl::StrCat("chunk ", number, ": elements ", next, " to ", begin));
      }
      next = begin + staged.count;
      gradients[number] += staged.gradient;
    }
    if (next != static_cast<uint64_t>(chunk.size())) {
      Violate("I6", job, absl::StrCat("chunk ", number, " is staged up to ", next));
    }
  }
  job.staging.clear();
  job.unapplied.insert(left.begin(), left.end());
  ApplyNext(job, decision, std::move(gradients), std::move(left));
}

void SimStore::ApplyNext(Job& job, const v1::StepDecision& decision,
                         std::map<uint32_t, uint64_t> gradients, std::vector<uint32_t> left) {
  World& world = cluster_->world();
  Work(job, world.Between(absl::Microseconds(100), absl::Milliseconds(600)),
       [this, decision, gradients, left](Job& job) {
         if (left.empty()) {
           CarryOut(job, job.control.OnApplied(absl::OkStatus()));
           Settle(job);
           return;
         }
         const uint32_t chunk = left.back();
         const auto found = gradients.find(chunk);
         job.state[chunk] = Reference::Applied(job.state[chunk], decision,
                                               found == gradients.end() ? 0 : found->second);
         job.unapplied.erase(chunk);
         job.control.OnChunkApplied(chunk, static_cast<uint32_t>(job.state[chunk]));
         std::vector<uint32_t> rest = left;
         rest.pop_back();
         ApplyNext(job, decision, gradients, std::move(rest));
         Settle(job);
       });
}

absl::Status SimStore::Push(const std::string& run_id, uint64_t generation, uint64_t epoch,
                            uint64_t step, uint32_t chunk, uint32_t begin, uint32_t count,
                            uint64_t gradient) {
  const auto found = jobs_.find(run_id);
  if (found == jobs_.end()) return absl::UnavailableError(absl::StrCat(run_id, " is not here"));
  Job& job = *found->second;
  const absl::Status status = job.control.OnStaged(generation, epoch, step, chunk, begin, count);
  if (!status.ok()) return status;
  if (generation != job.control.generation()) {
    Violate("I4", job, absl::StrCat("takes gradients of generation ", generation));
  }
  const v1::StoreReport& report = job.control.report();
  const uint64_t wanted =
      report.version().step() + (report.phase() == v1::STORE_PHASE_APPLYING ? 2 : 1);
  if (step == wanted) {
    if (job.unapplied.contains(chunk)) {
      Violate("I3", job,
              absl::StrCat("chunk ", chunk, " is staged for step ", step,
                           " while the step before is read from there"));
    }
    // Of a generation that ended while a step was applied.
    std::erase_if(job.staging[chunk],
                  [&](const auto& staged) { return staged.second.generation < generation; });
    job.staging[chunk][begin] = Job::Staged{count, generation, gradient};
    uint64_t total = 0;
    for (const auto& [first, staged] : job.staging[chunk]) total += staged.count;
    if (total > static_cast<uint64_t>(job.control.chunks().at(chunk).size())) {
      Violate("I12", job, absl::StrCat("chunk ", chunk, " has ", total, " elements staged"));
    }
  }
  Settle(job);
  return absl::OkStatus();
}

void SimStore::PullChunk(const std::string& run_id, Job::Pull pull) {
  const auto found = jobs_.find(run_id);
  if (found == jobs_.end()) {
    pull.answer(absl::UnavailableError(absl::StrCat(run_id, " is not here")), {}, 0);
    return;
  }
  found->second->pulls.push_back(std::move(pull));
  Settle(*found->second);
}

void SimStore::Settle(Job& job) {
  std::vector<Job::Pull> pulls;
  pulls.swap(job.pulls);
  for (Job::Pull& pull : pulls) {
    const auto ready = job.control.CheckPull(pull.generation, pull.epoch, pull.step, pull.chunk,
                                             pull.begin, pull.count);
    if (ready.ok() && *ready == store::JobControl::Pull::kWait) {
      job.pulls.push_back(std::move(pull));
      continue;
    }
    v1::StateVersion version;
    version.set_epoch(pull.epoch);
    version.set_step(pull.step);
    pull.answer(ready.status(), version, ready.ok() ? job.state[pull.chunk] : 0);
  }
  if (session_ == 0) return;
  std::string bytes = job.control.report().SerializeAsString();
  if (bytes == job.sent) return;
  job.sent = std::move(bytes);
  v1::MemberMessage message;
  *message.mutable_store() = job.control.report();
  Send(std::move(message));
}

// --- snapshots and digests ----------------------------------------------------------------------

void SimStore::WriteSnapshot(Job& job, const v1::SnapshotOrder& order) {
  if (job.control.report().version().step() != order.step()) {
    Violate("snapshots", job,
            absl::StrCat("of step ", order.step(), " begins at step ",
                         job.control.report().version().step()));
  }
  std::map<uint32_t, uint64_t> kept;
  for (const uint32_t chunk : order.chunks()) kept[chunk] = job.state.at(chunk);
  ++job.snapshot;
  After(cluster_->world().Between(absl::Milliseconds(1), absl::Seconds(5)),
        [this, run_id = job.control.report().run_id(), token = job.snapshot, order, kept] {
          const auto found = jobs_.find(run_id);
          if (found == jobs_.end() || found->second->snapshot != token) return;
          v1::SnapshotReport report;
          report.set_step(order.step());
          report.set_done(true);
          const auto folder = cluster_->disk().folders.find(order.folder());
          if (folder == cluster_->disk().folders.end()) {
            report.set_problem(absl::StrCat("there is no ", order.folder()));
          } else if (cluster_->DiskIsFull(found->second->control.job().job(), order.step())) {
            report.set_problem("the disk is full");
          } else {
            report.set_file(absl::StrCat("state-", order.index(), ".safetensors"));
            folder->second.files[report.file()] = kept;
          }
          found->second->control.OnSnapshot(report);
          Settle(*found->second);
        });
}

void SimStore::Digest(Job& job, uint64_t step) {
  Work(job, cluster_->world().Latency(), [this, step](Job& job) {
    const v1::StoreJob& what = job.control.job();
    const uint32_t replicas = what.map().replicas();
    uint64_t low = 0, high = 0;
    for (const auto& [number, chunk] : job.control.chunks()) {
      uint32_t first = store::kNoStore;
      for (uint32_t i = 0; i < replicas && first == store::kNoStore; ++i) {
        first = what.map().placement(static_cast<int>(number * replicas + i));
      }
      if (first != what.store()) continue;
      low += Reference::DigestLow(number, job.state[number]);
      high += Reference::DigestHigh(number, job.state[number]);
    }
    job.control.OnDigest(step, low, high);
    Settle(job);
  });
}

}  // namespace zeroshard::simulator
