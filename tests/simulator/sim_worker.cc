#include "tests/simulator/sim_worker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/simulator/sim_store.h"

namespace zeroshard::simulator {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);  // with a store that is not there

}  // namespace

void SimWorker::OnMessage(const v1::CoordinatorMessage& message) {
  if (message.has_refused()) {
    if (message.refused().fenced()) cluster_->Reincarnate(shared_from_this());
  } else if (message.has_assign()) {
    const v1::Assign& assign = message.assign();
    if (rank_ != nullptr && rank_->assign.run_id() == assign.run_id() &&
        rank_->assign.generation() >= assign.generation()) {
      return;
    }
    Begin(assign);
  } else if (message.has_stop()) {
    if (rank_ == nullptr || rank_->assign.run_id() != message.stop().run_id() ||
        rank_->assign.generation() > message.stop().generation()) {
      return;
    }
    End(absl::CancelledError(message.stop().reason()));
  }
}

std::function<void()> SimWorker::If(Then then) {
  std::weak_ptr<Process> self = weak_from_this();
  return [this, self, rank = std::weak_ptr<Rank>(rank_), then = std::move(then)] {
    const std::shared_ptr<Process> process = self.lock();
    const std::shared_ptr<Rank> current = rank.lock();
    if (process == nullptr || !process->alive() || current == nullptr || current != rank_) return;
    then(*current);
  };
}

void SimWorker::Phase(const std::string& phase) {
  rank_->progress.set_phase(phase);
  rank_->progress.set_step(rank_->step + 1);
  rank_->progress.set_advances(rank_->progress.advances() + 1);
}

void SimWorker::Watch(absl::Duration limit, absl::Status status) {
  After(limit, If([this, status, advances = rank_->progress.advances()](Rank& rank) {
          if (rank.progress.advances() == advances) End(status);
        }));
}

std::string SimWorker::Key(const std::string& what) const {
  return absl::StrCat(rank_->assign.run_id(), "/", rank_->assign.generation(), "/", what);
}

void SimWorker::Begin(const v1::Assign& assign) {
  rank_ = std::make_shared<Rank>();
  Rank& rank = *rank_;
  rank.assign = assign;
  rank.fence.set_member(name());
  rank.fence.set_incarnation(hello().incarnation());
  rank.fence.set_run_id(assign.run_id());
  rank.fence.set_generation(assign.generation());
  rank.fence.set_rank(assign.rank());
  cluster_->world().Trace(absl::StrCat(name(), " is rank ", assign.rank(), " of ", assign.run_id(),
                                       ", generation ", assign.generation(), ", from step ",
                                       assign.first_step()));
  if (!assign.has_stores()) {
    rank.step = assign.first_step() - 1;
    Phase("loading");
    After(cluster_->world().Between(absl::Milliseconds(1), absl::Seconds(1)),
          If([this](Rank&) { Load(); }));
    return;
  }
  if (assign.version().step() + 1 != assign.first_step() ||
      assign.next_sample() != reference().NextSample(assign.version().step())) {
    cluster_->world().Violate("I11", absl::StrCat("assignment: ", assign.first_step(), " from ",
                                                  assign.version().ShortDebugString(),
                                                  " at sample ", assign.next_sample()));
  }
  const ChunkTable& table = reference().table();
  for (uint32_t chunk = 0; chunk < table.chunks.size(); ++chunk) {
    const Chunk& what = table.chunks[chunk];
    const auto layout = ShardLayout::Make(reference().model().units[what.unit].length,
                                          static_cast<int>(assign.world_size()));
    const int64_t begin = std::max(what.begin, layout.Begin(static_cast<int>(assign.rank())));
    const int64_t end = std::min(what.end, layout.End(static_cast<int>(assign.rank())));
    if (begin >= end) continue;
    // Buckets end anywhere.
    const auto first = static_cast<uint32_t>(begin - what.begin);
    const auto count = static_cast<uint32_t>(end - begin);
    const auto cut = static_cast<uint32_t>(cluster_->world().Upto(count - 1));
    if (cut > 0) rank.parts.push_back(Part{chunk, first, cut});
    rank.parts.push_back(Part{chunk, first + cut, count - cut});
  }
  rank.evaluated = assign.version().step() - (assign.evaluate() ? 1 : 0);
  Phase("loading");
  After(cluster_->world().Between(absl::Milliseconds(1), absl::Seconds(1)),
        If([this](Rank& rank) { Pull(rank.assign.version().step()); }));
}

// --- parameters ---------------------------------------------------------------------------------

void SimWorker::Pull(uint64_t step) {
  rank_->step = step;
  Phase("offload");
  rank_->chunks.clear();
  rank_->since = cluster_->world().now();
  rank_->left = rank_->parts.size();
  Watch(absl::Seconds(60), absl::DeadlineExceededError("nothing came from the stores"));
  if (rank_->left == 0) return Gather();
  for (const Part& part : std::vector<Part>(rank_->parts)) PullPart(part, 0);
}

void SimWorker::PullPart(const Part& part, int tries) {
  const v1::StoreMap& map = rank_->assign.stores();
  std::vector<uint32_t> holders;
  for (uint32_t i = 0; i < map.replicas(); ++i) {
    const uint32_t store = map.placement(static_cast<int>(part.chunk * map.replicas() + i));
    if (store != store::kNoStore) holders.push_back(store);
  }
  if (holders.empty()) {
    cluster_->world().Violate("map", absl::StrCat("chunk ", part.chunk, " is nowhere"));
    return;
  }
  const uint32_t chosen = holders[cluster_->world().Upto(holders.size() - 1)];
  const std::string store = map.stores(static_cast<int>(chosen)).member();
  auto on_answer = [this, part, tries](Rank& rank, const absl::Status& status,
                                       const v1::StateVersion& version, uint64_t state) {
    if (status.ok()) {
      rank.chunks[part.chunk] = {version, state};
      if (--rank.left == 0) Gather();
      return;
    }
    if (absl::IsUnavailable(status) && cluster_->world().now() - rank.since < kPatience) {
      After(absl::Milliseconds(300), If([this, part, tries](Rank&) { PullPart(part, tries + 1); }));
      return;
    }
    cluster_->world().Trace(
        absl::StrCat(name(), " pulls chunk ", part.chunk, ": ", status.ToString()));
    End(absl::UnavailableError(status.message()));
  };
  const std::weak_ptr<Rank> current = rank_;
  std::weak_ptr<Process> self = weak_from_this();
  // The store may answer when this process is gone.
  Cluster* const cluster = cluster_;
  const auto back = [this, cluster, self, current, on_answer](
                        absl::Status status, v1::StateVersion version, uint64_t state) {
    cluster->world().After(
        cluster->world().Latency(), [this, self, current, on_answer, status, version, state] {
          const std::shared_ptr<Process> process = self.lock();
          if (process == nullptr || !process->alive()) return;
          After(absl::ZeroDuration(), [this, current, on_answer, status, version, state] {
            const std::shared_ptr<Rank> rank = current.lock();
            if (rank != nullptr && rank == rank_) on_answer(*rank, status, version, state);
          });
        });
  };
  SimStore::Job::Pull pull{rank_->assign.generation(),
                           rank_->assign.version().epoch(),
                           rank_->step,
                           part.chunk,
                           part.begin,
                           part.count,
                           back};
  cluster_->AtStore(
      store,
      [run_id = rank_->assign.run_id(), pull](SimStore& store) { store.PullChunk(run_id, pull); },
      [back] { back(absl::UnavailableError("no such store"), {}, 0); });
}

void SimWorker::Gather() {
  Rank& rank = *rank_;
  std::string mine;
  for (const auto& [chunk, entry] : rank.chunks) {
    absl::StrAppend(&mine, chunk, " ", entry.first.epoch(), " ", entry.first.step(), " ",
                    entry.second, ";");
  }
  Phase("communication");
  Watch(cluster_->world().Between(absl::Seconds(10), absl::Seconds(40)),
        absl::UnavailableError("a peer does not come"));
  cluster_->Collective(
      Key(absl::StrCat("gather ", rank.step)), rank.assign.rank(), rank.assign.world_size(), mine,
      [this, then = rank_, self = weak_from_this()](const std::map<uint32_t, std::string>& values) {
        const std::shared_ptr<Process> process = self.lock();
        if (process == nullptr || !process->alive()) return;
        After(absl::ZeroDuration(), [this, then, values] {
          if (rank_ != then) return;
          for (const auto& [rank, text] : values) {
            for (const auto entry : absl::StrSplit(text, ';', absl::SkipEmpty())) {
              const std::vector<std::string> fields = absl::StrSplit(entry, ' ');
              uint64_t numbers[4] = {};
              for (int i = 0; i < 4; ++i) (void)absl::SimpleAtoi(fields[i], &numbers[i]);
              v1::StateVersion version;
              version.set_epoch(numbers[1]);
              version.set_step(numbers[2]);
              const auto [chunk, fresh] = then->chunks.emplace(static_cast<uint32_t>(numbers[0]),
                                                               std::make_pair(version, numbers[3]));
              if (!fresh && chunk->second.second != numbers[3]) {
                cluster_->world().Violate(
                    "I8", absl::StrCat("ranks see two states of chunk ", numbers[0]));
              }
            }
          }
          Compute();
        });
      });
}

// --- a step -------------------------------------------------------------------------------------

void SimWorker::Compute() {
  Rank& rank = *rank_;
  cluster_->invariants().OnCompute(rank.assign.job(), name(), rank.assign.version().epoch(),
                                   rank.step, rank.chunks);
  if (!rank.started) {
    Barrier("start", [this](Rank& rank) {
      rank.started = true;
      Compute();
    });
    return;
  }
  if (rank.step > rank.evaluated && reference().Evaluates(rank.step)) return Evaluate();
  if (rank.step == rank.assign.spec().steps()) return Finish();
  Phase("forward");
  After(cluster_->world().Between(absl::Milliseconds(5), absl::Seconds(1)),
        If([this](Rank&) { Push(); }));
}

// All ranks together; rank 0 has the loss.
void SimWorker::Evaluate() {
  Rank& rank = *rank_;
  rank.evaluated = rank.step;
  Phase("forward");
  After(cluster_->world().Between(absl::Milliseconds(5), absl::Seconds(2)), If([this](Rank& rank) {
          Phase("communication");
          Watch(cluster_->world().Between(absl::Seconds(10), absl::Seconds(40)),
                absl::UnavailableError("a peer does not come"));
          cluster_->Collective(Key(absl::StrCat("evaluate ", rank.step)), rank.assign.rank(),
                               rank.assign.world_size(), "",
                               [this, then = rank_,
                                self = weak_from_this()](const std::map<uint32_t, std::string>&) {
                                 const std::shared_ptr<Process> process = self.lock();
                                 if (process == nullptr || !process->alive()) return;
                                 After(absl::ZeroDuration(), [this, then] {
                                   if (rank_ == then) Evaluated();
                                 });
                               });
        }));
}

void SimWorker::Evaluated() {
  Rank& rank = *rank_;
  if (rank.assign.rank() == 0) {
    if (cluster_->LosesEvaluator()) {
      Cluster* const cluster = cluster_;
      const std::string who = name();
      cluster->Kill(who, cluster->world().Chance(50));
      cluster->world().After(cluster->world().Between(absl::Milliseconds(50), absl::Seconds(30)),
                             [cluster, who] { cluster->StartMember(v1::MEMBER_KIND_WORKER, who); });
      return;
    }
    // Of a step of the generation before nothing else is known.
    v1::StepRecord record;
    if (rank.step >= rank.assign.first_step()) record = reference().Record(rank.step);
    record.set_step(rank.step);
    std::vector<uint64_t> state;
    for (const auto& [chunk, entry] : rank.chunks) state.push_back(entry.second);
    record.set_eval_loss(Reference::EvalLoss(state));
    rank.unreported.push_back(record);
    if (cluster_->world().Chance(70)) Report();
  }
  Compute();
}

void SimWorker::Push() {
  Rank& rank = *rank_;
  Phase("backward");
  Watch(cluster_->world().Between(absl::Seconds(10), absl::Seconds(60)),
        absl::DeadlineExceededError("a store takes no gradients"));
  rank.since = cluster_->world().now();
  rank.left = 1;
  const v1::StoreMap& map = rank.assign.stores();
  for (const Part& part : rank.parts) {
    if (!reference().table().chunks[part.chunk].trained) continue;
    for (uint32_t i = 0; i < map.replicas(); ++i) {
      const uint32_t store = map.placement(static_cast<int>(part.chunk * map.replicas() + i));
      if (store == store::kNoStore) continue;
      ++rank.left;
      PushPart(part, map.stores(static_cast<int>(store)), 0);
    }
  }
  Pushed();
}

void SimWorker::PushPart(const Part& part, const v1::StoreMap::Store& store, int tries) {
  const Rank& rank = *rank_;
  std::vector<uint64_t> weights;
  for (const auto& [chunk, entry] : rank.chunks) weights.push_back(entry.second);
  const uint64_t hash = Reference::HashOfWeights(weights);
  const uint64_t step = rank.step + 1;
  const uint64_t gradient =
      Reference::GradientPrefix(hash, step, part.chunk, part.begin + part.count) -
      Reference::GradientPrefix(hash, step, part.chunk, part.begin);
  const std::weak_ptr<Rank> current = rank_;
  const std::weak_ptr<Process> self = weak_from_this();
  Cluster* const cluster = cluster_;
  const auto back = [this, cluster, self, current, part, store, tries](const absl::Status& status) {
    cluster->world().After(
        cluster->world().Latency(), [this, self, current, part, store, tries, status] {
          const std::shared_ptr<Process> process = self.lock();
          if (process == nullptr || !process->alive()) return;
          After(absl::ZeroDuration(), [this, current, part, store, tries, status] {
            const std::shared_ptr<Rank> rank = current.lock();
            if (rank == nullptr || rank != rank_) return;
            if (status.ok()) return Pushed();
            if (absl::IsUnavailable(status) && cluster_->world().now() - rank->since < kPatience) {
              After(absl::Milliseconds(50),
                    If([this, part, store, tries](Rank&) { PushPart(part, store, tries + 1); }));
              return;
            }
            cluster_->world().Trace(absl::StrCat(name(), " pushes chunk ", part.chunk, " to ",
                                                 store.member(), ": ", status.ToString()));
            End(absl::UnavailableError(status.message()));
          });
        });
  };
  const auto push = [run_id = rank.assign.run_id(), generation = rank.assign.generation(),
                     epoch = rank.assign.version().epoch(), step, part, gradient](SimStore& store) {
    return store.Push(run_id, generation, epoch, step, part.chunk, part.begin, part.count,
                      gradient);
  };
  // Said twice, the second time perhaps much later.
  World& world = cluster_->world();
  if (cluster_->options().losses && world.Chance(4)) {
    After(world.Between(absl::Milliseconds(1), absl::Seconds(10)), [this, push, store] {
      cluster_->AtStore(
          store.member(), [push](SimStore& to) { (void)push(to); }, [] {});
    });
  }
  cluster_->AtStore(
      store.member(), [push, back](SimStore& to) { back(push(to)); },
      [back] { back(absl::UnavailableError("no such store")); });
}

void SimWorker::Pushed() {
  Rank& rank = *rank_;
  if (--rank.left != 0) return;
  Phase("communication");
  Watch(cluster_->world().Between(absl::Seconds(10), absl::Seconds(40)),
        absl::UnavailableError("a peer does not come"));
  cluster_->Collective(
      Key(absl::StrCat("exchange ", rank.step + 1)), rank.assign.rank(), rank.assign.world_size(),
      "", [this, then = rank_, self = weak_from_this()](const std::map<uint32_t, std::string>&) {
        const std::shared_ptr<Process> process = self.lock();
        if (process == nullptr || !process->alive()) return;
        After(absl::ZeroDuration(), [this, then] {
          if (rank_ != then) return;
          if (then->assign.rank() == 0) return Commit();
          Pull(then->step + 1);
        });
      });
}

void SimWorker::Commit() {
  Phase("waiting");
  // What the decision of the next step would write down without it.
  const auto& waits = rank_->unreported;
  rank_->commits = std::any_of(waits.begin(), waits.end(),
                               [](const v1::StepRecord& record) { return record.has_eval_loss(); });
  if (rank_->commits) return Report();
  const uint64_t step = rank_->step + 1;
  v1::CommitStepRequest body;
  *body.mutable_fence() = rank_->fence;
  *body.mutable_record() = reference().Record(step);
  body.set_epoch(rank_->assign.version().epoch());
  body.set_next_sample(reference().NextSample(step));
  body.set_samples(Reference::kSamples);
  cluster_->Call(
      shared_from_this(),
      [body](RequestId id) {
        return coordinator::CommitStep{id, body};
      },
      [this, then = rank_](bool lost, const Reply& reply) {
        if (rank_ != then) return;
        if (lost) {
          After(cluster_->world().Between(absl::Milliseconds(100), absl::Seconds(2)),
                If([this](Rank&) { Commit(); }));
          return;
        }
        if (!reply.status.ok()) {
          cluster_->world().Trace(absl::StrCat(name(), " commits: ", reply.status.ToString()));
          return End(absl::AbortedError(reply.status.message()));
        }
        v1::StepDecision decision;
        if (!decision.ParseFromString(reply.text)) {
          cluster_->world().Violate("protocol", "the answer to CommitStep is no decision");
          return;
        }
        OnCommitted(decision);
      });
}

void SimWorker::OnCommitted(const v1::StepDecision& decision) {
  Rank& rank = *rank_;
  v1::StepDecision wanted = reference().Decision(rank.step + 1);
  wanted.set_epoch(rank.assign.version().epoch());
  wanted.set_generation(rank.assign.generation());
  wanted.set_snapshot(decision.snapshot());
  if (wanted.SerializeAsString() != decision.SerializeAsString()) {
    cluster_->world().Violate("I11", absl::StrCat("decided {", decision.ShortDebugString(),
                                                  "}, wanted {", wanted.ShortDebugString(), "}"));
  }
  // A step that is evaluated is reported after that.
  if (!reference().Evaluates(rank.step + 1)) {
    rank.unreported.push_back(reference().Record(rank.step + 1));
    // Reports come in batches, and some only at the end.
    if (cluster_->world().Chance(70)) Report();
  }
  Pull(rank.step + 1);
}

void SimWorker::Report() {
  Rank& rank = *rank_;
  if (rank.reporting || (rank.unreported.empty() && rank.unsaid.empty())) return;
  rank.reporting = true;
  v1::ReportStepsRequest body;
  *body.mutable_fence() = rank.fence;
  for (const v1::StepRecord& record : rank.unreported) *body.add_records() = record;
  for (const v1::CheckpointRecord& record : rank.unsaid) *body.add_checkpoints() = record;
  const size_t count = rank.unreported.size(), saved = rank.unsaid.size();
  cluster_->Call(
      shared_from_this(),
      [body](RequestId id) {
        return coordinator::ReportSteps{id, body};
      },
      [this, count, saved, then = rank_](bool lost, const Reply& reply) {
        if (rank_ != then) return;
        then->reporting = false;
        if (!lost && !reply.status.ok()) {
          cluster_->world().Trace(absl::StrCat(name(), " reports: ", reply.status.ToString()));
          return End(absl::AbortedError(reply.status.message()));
        }
        if (!lost) {
          then->unreported.erase(then->unreported.begin(),
                                 then->unreported.begin() + static_cast<ptrdiff_t>(count));
          then->unsaid.erase(then->unsaid.begin(),
                             then->unsaid.begin() + static_cast<ptrdiff_t>(saved));
        }
        if (then->finished && then->unreported.empty() && then->unsaid.empty())
          return End(absl::OkStatus());
        if (then->commits && then->unreported.empty()) return Commit();
        if (lost || then->finished || then->commits) {
          After(absl::Milliseconds(500), If([this](Rank&) { Report(); }));
        }
      });
}

void SimWorker::Barrier(const std::string& name, Then then) {
  Phase("barrier");
  v1::BarrierRequest body;
  *body.mutable_fence() = rank_->fence;
  body.set_name(name);
  body.set_timeout_ms(60000);
  cluster_->Call(
      shared_from_this(),
      [body](RequestId id) {
        return coordinator::ArriveAtBarrier{id, body};
      },
      [this, name, then, rank = rank_](bool lost, const Reply& reply) {
        if (rank_ != rank) return;
        if (lost) {
          After(absl::Milliseconds(500), If([this, name, then](Rank&) { Barrier(name, then); }));
        } else if (reply.status.ok()) {
          then(*rank);
        } else {
          End(reply.status);
        }
      });
}

// --- the end ------------------------------------------------------------------------------------

void SimWorker::Finish() {
  Barrier("finish", [this](Rank& rank) {
    rank.finished = true;
    const bool told = rank.unreported.empty() && rank.unsaid.empty();
    if (told && !rank.reporting) return End(absl::OkStatus());
    Report();
  });
}

void SimWorker::End(const absl::Status& status) {
  v1::ReportEndRequest body;
  *body.mutable_fence() = rank_->fence;
  body.set_completed(status.ok());
  if (!status.ok()) {
    // A fence that is over is no error of this rank.
    const bool fenced =
        absl::IsFailedPrecondition(status) && !absl::StrContains(status.message(), "writes there");
    body.set_error_code(fenced ? "ABORTED" : absl::StatusCodeToString(status.code()));
    body.set_message(std::string(status.message()));
  }
  if (!status.ok()) {
    cluster_->world().Trace(
        absl::StrCat(name(), " ends rank ", rank_->assign.rank(), ": ", status.ToString()));
  }
  if (status.ok() && !rank_->assign.has_stores()) body.set_weights_digest(reference().Digest());
  if (status.ok()) {
    // It says that it runs until the coordinator has its last word.
    rank_->finished = true;
    Phase("waiting");
  }
  SendEnd(body, 0);
  if (!status.ok()) rank_.reset();
}

void SimWorker::SendEnd(v1::ReportEndRequest body, int tries) {
  const std::weak_ptr<Rank> completed = body.completed() ? rank_ : nullptr;
  cluster_->Call(
      shared_from_this(),
      [body](RequestId id) {
        return coordinator::ReportEnd{id, body};
      },
      [this, body, tries, completed](bool lost, const Reply&) {
        const std::shared_ptr<Rank> rank = completed.lock();
        if (body.completed() && (rank == nullptr || rank != rank_)) return;
        if (lost && (body.completed() || tries < 3)) {
          After(absl::Milliseconds(500), [this, body, tries, completed] {
            const std::shared_ptr<Rank> rank = completed.lock();
            if (!body.completed() || (rank != nullptr && rank == rank_)) SendEnd(body, tries + 1);
          });
          return;
        }
        if (body.completed()) rank_.reset();
      });
}

}  // namespace zeroshard::simulator
