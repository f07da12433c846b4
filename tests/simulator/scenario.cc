#include "tests/simulator/scenario.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan/planner.h"
#include "common/spec/job_spec.h"
#include "coordinator/core/text.h"
#include "tests/simulator/cluster.h"
#include "tests/simulator/sim_coordinator.h"
#include "tests/simulator/sim_store.h"

namespace zeroshard::simulator {
namespace {

constexpr absl::Duration kQuietLimit = absl::Hours(2);  // after the last fault
constexpr uint64_t kMaxSteps = 20000000;
const std::vector<v1::ShardPlan> kNoPlan;  // nothing is known of what its ranks take

class Scenario {
 public:
  Scenario(uint64_t seed, const ScenarioOptions& options)
      : options_(options),
        chance_(Mix(seed, 17)),
        leaves_(Mix(seed, 31)),
        evaluates_(Mix(seed, 37)),
        disks_(Mix(seed, 41)),
        cluster_(Mix(seed, 23), Shape()) {
    cluster_.world().verbose = options.verbose;
  }

  Outcome Run();

 private:
  ClusterOptions Shape();
  v1::JobSpec Spec(const std::string& name);
  void Submit(const v1::JobSpec& spec);
  void NextFault();
  void NextLeave(int left);
  void NextBrokenDisk(int left);
  void Fault();
  bool Ended() const;
  bool Dropped() const;
  World& world() { return cluster_.world(); }

  const ScenarioOptions options_;
  World chance_;     // decides the shape; apart, so that a change of it leaves the rest alone
  World leaves_;     // decides when stores are asked to leave
  World evaluates_;  // decides which jobs have a validation set
  World disks_;      // decides which disks take nothing, when
  uint32_t replicas_ = 1;
  uint32_t workers_ = 1;
  uint64_t faults_left_ = 0;
  uint64_t faults_ = 0;
  absl::Duration apart_ = absl::Seconds(2);
  absl::Duration last_fault_ = absl::ZeroDuration();
  int gone_for_good_ = 0;
  int broken_for_good_ = 0;
  uint64_t broken_ = 0;
  std::string setting_;
  std::vector<std::string> jobs_;
  Cluster cluster_;
};

ClusterOptions Scenario::Shape() {
  ClusterOptions shape;
  shape.stores = static_cast<int>(1 + chance_.Upto(2));
  replicas_ = static_cast<uint32_t>(1 + chance_.Upto(std::min(1, shape.stores - 1)));
  workers_ = static_cast<uint32_t>(1 + chance_.Upto(2));
  const int jobs = chance_.Chance(25) ? 2 : 1;
  shape.workers = static_cast<int>(workers_) * jobs;
  shape.spares = static_cast<int>(chance_.Upto(1));
  shape.losses = options_.faults;
  for (int i = 0; i < jobs; ++i) jobs_.push_back(i == 0 ? "alpha" : "beta");
  // Each counts as a fault.
  shape.evaluators_lost = options_.faults ? static_cast<int>(evaluates_.Upto(3)) : 0;
  faults_left_ = options_.faults ? chance_.Upto(chance_.Chance(30) ? 40 : 12) : 0;
  const absl::Duration apart[] = {absl::Milliseconds(300), absl::Seconds(3), absl::Seconds(20)};
  apart_ = apart[chance_.Upto(2)];
  setting_ = absl::StrCat(shape.stores, " stores, ", replicas_, " replicas, ", jobs, " jobs of ",
                          workers_, " workers, ", faults_left_, " faults");
  return shape;
}

v1::JobSpec Scenario::Spec(const std::string& name) {
  v1::JobSpec spec;
  spec.set_name(name);
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_architecture("gpt2");
  model.set_hidden_size(8);
  model.set_layers(static_cast<uint32_t>(1 + chance_.Upto(4)));
  model.set_heads(1);
  model.set_sequence_length(8);
  model.set_vocab_size(16);
  if (chance_.Chance(20)) model.add_trainable("blocks.*");
  spec.mutable_data()->add_train("/data");
  spec.mutable_data()->set_tokenizer("bytes");
  spec.mutable_model()->set_vocab_size(256);
  spec.mutable_resources()->set_workers(workers_);
  spec.set_train_batch_size(workers_ * 2);
  spec.set_train_micro_batch_size_per_gpu(1);
  spec.set_steps(3 + chance_.Upto(chance_.Chance(40) ? 40 : 9));
  spec.set_seed(chance_.Random() % 1000);
  spec.set_gradient_clipping(1.0);
  spec.mutable_bf16()->set_enabled(true);
  spec.mutable_zero_optimization()->set_stage(2);
  spec.mutable_zero_optimization()->mutable_offload_optimizer()->set_device("cpu");
  spec.mutable_store()->set_replicas(replicas_);
  spec.mutable_timeouts()->set_start_seconds(90);
  spec.mutable_timeouts()->set_step_seconds(90);
  spec.mutable_timeouts()->set_collective_seconds(30);
  if (chance_.Chance(70)) {
    spec.mutable_checkpoint()->set_dir("/ckpt/" + name);
    spec.mutable_checkpoint()->set_interval_steps(chance_.Upto(3));
  }
  if (evaluates_.Chance(50)) {
    spec.mutable_eval()->add_data("/validation");
    spec.mutable_eval()->set_interval_steps(1 + evaluates_.Upto(5));
  }
  if (options_.on_ranks) {
    spec.mutable_zero_optimization()->clear_offload_optimizer();
    spec.clear_store();
    spec.clear_eval();
    spec.mutable_checkpoint()->set_dir("/ckpt/" + name);
    spec.mutable_checkpoint()->set_interval_steps(1 + spec.seed() % 4);
    spec.mutable_checkpoint()->set_keep_last(static_cast<uint32_t>(1 + spec.seed() % 2));
  }
  const absl::Status status = NormaliseJobSpec(&spec);
  if (!status.ok()) world().Violate("setting", status.ToString());
  return spec;
}

void Scenario::Submit(const v1::JobSpec& spec) {
  // The client's call may be lost; it asks again, and a name that is taken is its own.
  struct Client {
    static void Try(Scenario* self, v1::JobSpec spec, RequestId id) {
      World& world = self->world();
      if (self->cluster_.coordinator().up()) {
        bool known = false;
        for (const auto& [run_id, run] : self->cluster_.coordinator().core().runs()) {
          known |= run.job.spec.name() == spec.name();
        }
        if (known) return;
        const auto plan = PlanShards(spec);
        self->cluster_.coordinator().Handle(
            coordinator::Submit{id, spec, self->options_.on_ranks ? *plan : kNoPlan, {}});
      }
      world.After(absl::Seconds(2), [self, spec, id] { Try(self, spec, id + 1); });
    }
  };
  Client::Try(this, spec, uint64_t{1} << (40 + jobs_.size() + spec.name().size()));
}

void Scenario::NextFault() {
  if (faults_left_ == 0) return;
  world().After(world().Between(absl::Milliseconds(1), 3 * apart_), [this] {
    if (faults_left_ == 0 || Ended()) return;
    --faults_left_;
    ++faults_;
    cluster_.invariants().OnFault();
    last_fault_ = world().now();
    Fault();
    NextFault();
  });
}

void Scenario::NextLeave(int left) {
  if (left == 0) return;
  world().After(leaves_.Between(absl::Milliseconds(1), absl::Seconds(40)), [this, left] {
    if (Ended()) return;
    const std::string name =
        absl::StrCat("store-", leaves_.Upto(static_cast<uint64_t>(cluster_.options().stores - 1)));
    if (const std::shared_ptr<SimStore> store = cluster_.FindStore(name); store != nullptr) {
      cluster_.invariants().OnFault();
      last_fault_ = world().now();
      store->AskToLeave();
    }
    NextLeave(left - 1);
  });
}

void Scenario::NextBrokenDisk(int left) {
  if (left == 0) return;
  world().After(disks_.Between(absl::Milliseconds(1), absl::Seconds(40)), [this, left] {
    if (Ended()) return;
    const int stores = cluster_.options().stores;
    const std::string name = absl::StrCat("store-", disks_.Upto(static_cast<uint64_t>(stores - 1)));
    absl::Duration how_long = disks_.Between(absl::Seconds(1), absl::Minutes(2));
    if (disks_.Chance(40) && gone_for_good_ + broken_for_good_ + 1 < stores) {
      ++broken_for_good_;
      how_long = absl::Hours(1000);
    }
    // Not one of the faults that excuse a job which gives up: only a disk is ill.
    ++broken_;
    last_fault_ = world().now();
    cluster_.BreakDisk(name, how_long);
    NextBrokenDisk(left - 1);
  });
}

void Scenario::Fault() {
  const auto any = [this](const std::string& kind) {
    std::vector<std::string> names;
    for (const auto& [name, process] : cluster_.members()) {
      if (name.starts_with(kind)) names.push_back(name);
    }
    return names.empty() ? std::string() : names[world().Upto(names.size() - 1)];
  };
  const auto stopped = [this] {
    return world().Chance(50) ? world().Between(absl::Milliseconds(100), absl::Seconds(5))
                              : world().Between(absl::Seconds(5), absl::Seconds(40));
  };
  const auto kill = [this](const std::string& name) {
    if (name.empty()) return;
    const bool store = name.starts_with("store");
    cluster_.Kill(name, world().Chance(50));
    // Some never come back, as long as others can do their part.
    if (world().Chance(20)) {
      const int left =
          store ? cluster_.options().stores - static_cast<int>(replicas_) - broken_for_good_
                : cluster_.options().spares;
      if (gone_for_good_ < left) {
        ++gone_for_good_;
        return;
      }
    }
    world().After(world().Between(absl::Milliseconds(50), absl::Seconds(30)), [this, name, store] {
      cluster_.StartMember(store ? v1::MEMBER_KIND_STORE : v1::MEMBER_KIND_WORKER, name);
    });
  };
  // A store that another one copies from, else any.
  const auto source = [&] {
    for (const auto& [name, process] : cluster_.members()) {
      const auto* store = dynamic_cast<const SimStore*>(process.get());
      if (store == nullptr) continue;
      for (const auto& [run_id, job] : store->jobs()) {
        const v1::StoreJob& what = job->control.job();
        if (job->control.report().phase() != v1::STORE_PHASE_LOADING || what.copies().empty()) {
          continue;
        }
        const auto from = static_cast<int>(what.copies(0).from_store());
        if (cluster_.Find(what.map().stores(from).member()) != nullptr) {
          return what.map().stores(from).member();
        }
      }
    }
    return any("store");
  };
  switch (world().Upto(11)) {
    case 0:
    case 1:
      return kill(any("store"));
    case 2:
    case 3:
      return kill(any("worker"));
    case 4:
    case 5:
    case 6:
      world().Trace("the coordinator is to die soon");
      return cluster_.coordinator().CrashIn(1 + world().Upto(12));
    case 7:
      return cluster_.Pause(any(world().Chance(50) ? "store" : "worker"), stopped());
    case 8:
      return cluster_.BreakSession(any(world().Chance(50) ? "store" : "worker"));
    case 9:
    case 10:
      return kill(source());
    default:
      return cluster_.coordinator().Pause(stopped());
  }
}

bool Scenario::Ended() const {
  auto& coordinator = const_cast<Cluster&>(cluster_).coordinator();
  if (!coordinator.up()) return false;
  size_t ended = 0;
  for (const auto& [run_id, run] : coordinator.core().runs()) {
    ended += coordinator::IsEnded(run.job.state) ? 1 : 0;
  }
  return ended == jobs_.size();
}

bool Scenario::Dropped() const {
  for (const auto& [name, process] : cluster_.members()) {
    const auto* store = dynamic_cast<const SimStore*>(process.get());
    if (store == nullptr) continue;
    for (const auto& [run_id, job] : store->jobs()) {
      if (!job->control.dropped() && !job->control.chunks().empty()) return false;
    }
  }
  return true;
}

Outcome Scenario::Run() {
  std::vector<v1::JobSpec> specs;
  for (const std::string& name : jobs_) {
    specs.push_back(Spec(name));
    if (world().violated()) break;
    cluster_.references()[name] = std::make_unique<Reference>(specs.back());
  }
  cluster_.coordinator().Start();
  for (const v1::JobSpec& spec : specs) {
    world().After(world().Between(absl::Milliseconds(1), absl::Seconds(5)),
                  [this, spec] { Submit(spec); });
  }
  NextFault();
  if (options_.faults && leaves_.Chance(40)) NextLeave(static_cast<int>(1 + leaves_.Upto(3)));
  if (options_.faults && disks_.Chance(40)) {
    NextBrokenDisk(static_cast<int>(1 + disks_.Upto(2)));
  }
  last_fault_ = world().now();
  while (!world().violated() && !Ended()) {
    if (!world().Step()) break;
    cluster_.invariants().Check();
    if (world().now() - last_fault_ > kQuietLimit && faults_left_ == 0) {
      world().Violate("liveness", "the jobs have not ended two hours after the last fault");
    }
    if (world().steps() > kMaxSteps) world().Violate("liveness", "too many events");
  }
  if (!world().violated()) {
    for (const std::string& job : jobs_) {
      const auto status = cluster_.coordinator().core().Status(
          job, coordinator::Moment{world().now(), world().unix_ms()});
      if (status.ok()) {
        cluster_.invariants().CheckEnd(*status);
      } else {
        world().Violate("end", status.status().ToString());
      }
    }
  }
  const absl::Duration end = world().now();
  while (!world().violated() && !(Ended() && Dropped()) && world().Step()) {
    if (world().now() - end > absl::Minutes(10))
      world().Violate("drop", "stores still hold ended jobs");
  }
  Outcome outcome;
  outcome.ok = !world().violated();
  outcome.violation = world().violation();
  outcome.setting = setting_;
  outcome.trace = world().TraceText();
  outcome.steps = world().steps();
  outcome.faults = faults_;
  outcome.recoveries = cluster_.invariants().recoveries();
  outcome.rollbacks = cluster_.invariants().rollbacks();
  outcome.decisions = cluster_.invariants().decisions();
  outcome.given_up = cluster_.invariants().given_up();
  outcome.cut_copies = cluster_.invariants().cut_copies();
  outcome.left = cluster_.invariants().left();
  outcome.made_up = cluster_.invariants().made_up();
  outcome.left_out = cluster_.invariants().left_out();
  outcome.broken = broken_;
  outcome.went_back = cluster_.invariants().went_back();
  outcome.unreported = cluster_.invariants().unreported();
  outcome.refused = cluster_.invariants().refused();
  outcome.boots = cluster_.coordinator().boot();
  outcome.seconds = absl::ToDoubleSeconds(world().now() - absl::Seconds(100));
  return outcome;
}

}  // namespace

Outcome Simulate(uint64_t seed, const ScenarioOptions& options) {
  return Scenario(seed, options).Run();
}

}  // namespace zeroshard::simulator
