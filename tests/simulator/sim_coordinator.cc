#include "tests/simulator/sim_coordinator.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "coordinator/core/text.h"
#include "tests/simulator/cluster.h"

namespace zeroshard::simulator {

using coordinator::Action;
using coordinator::Decision;
using coordinator::Event;
using coordinator::Moment;

namespace {

std::string NameOf(const std::string& run_id) { return run_id.substr(0, run_id.rfind('-')); }

std::string PathOf(const std::string& run_id, uint64_t step) {
  return absl::StrFormat("/ckpt/%s/step-%08d", NameOf(run_id), step);
}

}  // namespace

SimCoordinator::SimCoordinator(Cluster* cluster) : cluster_(cluster) {}

void SimCoordinator::Start() {
  if (up()) return;
  World& world = cluster_->world();
  ++boot_;
  coordinator::LoadedState state = *log_.Load();
  for (auto& [run_id, job] : state.jobs) {
    const auto found = cluster_->disk().histories.find(run_id);
    if (found == cluster_->disk().histories.end()) continue;
    for (const v1::StepRecord& record : found->second) {
      if (record.step() < job.job.first_step) continue;
      if (job.first.step() == 0) job.first = record;
      job.last = record;
    }
  }
  core_ = std::make_unique<coordinator::Core>(options_, std::move(state), "cluster");
  paused_until_ = absl::ZeroDuration();
  wake_ = absl::InfiniteDuration();
  world.Trace(absl::StrCat("the coordinator starts, boot ", boot_));
  Execute(core_->Start(Moment{world.now(), world.unix_ms()}));
}

void SimCoordinator::Handle(const Event& event) {
  if (!up()) return;
  World& world = cluster_->world();
  if (paused_until_ > world.now()) {
    world.After(paused_until_ - world.now(), [this, event, boot = boot_] {
      if (boot == boot_) Handle(event);
    });
    return;
  }
  Execute(core_->Decide(event, Moment{world.now(), world.unix_ms()}));
}

void SimCoordinator::Pause(absl::Duration how_long) {
  if (!up()) return;
  cluster_->world().Trace(
      absl::StrCat("the coordinator is stopped for ", absl::FormatDuration(how_long)));
  paused_until_ = std::max(paused_until_, cluster_->world().now() + how_long);
}

void SimCoordinator::Execute(const Decision& decision) {
  World& world = cluster_->world();
  for (const std::string& reason : decision.reasons) world.Trace(absl::StrCat("C: ", reason));
  enum { kLives, kBefore, kAfter, kBetween } end = kLives;
  // Only where it makes a difference: at an event that is written down or does something.
  const bool matters = !decision.records.empty() || decision.actions.size() > 1;
  if (crash_in_ != 0 && matters && --crash_in_ == 0) {
    end = static_cast<decltype(end)>(1 + world.Upto(2));
  }
  if (end == kBefore) return Crash("before the log had its decision");
  cluster_->invariants().OnRecords(decision.records);
  (void)log_.Append(decision.records);
  if (end == kAfter) return Crash("after the log had its decision");
  size_t most = decision.actions.size();
  if (end == kBetween && most > 0) most = world.Upto(most - 1);
  for (size_t i = 0; i < most; ++i) Act(decision.actions[i]);
  if (end == kBetween) {
    return Crash(absl::StrCat("after ", most, " of ", decision.actions.size(), " actions"));
  }
  Wake();
}

void SimCoordinator::Wake() {
  const absl::Duration next = core_->NextDeadline();
  if (next >= wake_ && wake_ > cluster_->world().now()) return;
  wake_ = next;
  cluster_->world().After(next - cluster_->world().now(), [this, boot = boot_, next] {
    if (!up() || boot != boot_ || next != wake_) return;
    wake_ = absl::InfiniteDuration();
    Handle(coordinator::Tick{});
  });
}

void SimCoordinator::Crash(const std::string& when) {
  cluster_->world().Trace(absl::StrCat("the coordinator dies ", when));
  core_.reset();
  folders_.clear();
  cluster_->LoseCalls();
  cluster_->BreakAll();
  cluster_->world().After(cluster_->world().Between(absl::Milliseconds(50), absl::Seconds(15)),
                          [this] { Start(); });
}

void SimCoordinator::Later(absl::Duration delay, Event event) {
  cluster_->world().After(delay, [this, boot = boot_, event = std::move(event)] {
    if (boot == boot_) Handle(event);
  });
}

void SimCoordinator::Act(const Action& action) {
  std::visit([this](const auto& specific) { On(specific); }, action);
}

void SimCoordinator::On(const coordinator::SendToSession& action) {
  if (action.message.has_assign()) cluster_->invariants().OnAssign(action.message.assign());
  cluster_->SendDown(action.session, action.message);
}

void SimCoordinator::On(const coordinator::CloseSession& action) {
  cluster_->CloseDown(action.session);
}

void SimCoordinator::On(const coordinator::Reply& action) { cluster_->OnReply(action); }

void SimCoordinator::On(const coordinator::AppendHistory& action) {
  std::vector<v1::StepRecord>& history = cluster_->disk().histories[action.run_id];
  for (const v1::StepRecord& record : action.records) {
    const uint64_t wanted = history.empty() ? 1 : history.back().step() + 1;
    // Of steps that nobody reported before the checkpoint after them was gone on from.
    const auto run = core_->runs().find(action.run_id);
    const bool lacks = run != core_->runs().end() && record.step() == run->second.job.first_step &&
                       record.step() > wanted;
    if (record.step() != wanted && !lacks) {
      cluster_->world().Violate("history", absl::StrCat("of ", action.run_id, " gets step ",
                                                        record.step(), " after step ", wanted - 1));
    }
    history.push_back(record);
  }
  if (!history.empty()) cluster_->invariants().OnHistory(action.run_id, history.back().step());
}

void SimCoordinator::On(const coordinator::TruncateHistory& action) {
  std::vector<v1::StepRecord>& history = cluster_->disk().histories[action.run_id];
  while (!history.empty() && history.back().step() >= action.first_step) history.pop_back();
  Later(absl::ZeroDuration(), coordinator::HistoryTruncated{action.run_id});
}

void SimCoordinator::On(const coordinator::FindNewest& action) {
  World& world = cluster_->world();
  coordinator::NewestFound found{action.run_id, std::nullopt};
  if (cluster_->options().losses && world.Chance(10)) {
    found.checkpoint = absl::DeadlineExceededError("the folder does not answer");
  } else {
    std::optional<coordinator::Checkpoint> newest;
    for (const auto& [path, folder] : cluster_->disk().folders) {  // by step
      if (!folder.complete || !absl::StartsWith(path, action.dir)) continue;
      if (newest && folder.step > action.committed_step) continue;
      newest.emplace();
      newest->resume.set_checkpoint(path);
      newest->step = folder.step;
    }
    found.checkpoint = newest;
  }
  Later(world.Between(absl::Milliseconds(1), absl::Seconds(5)), found);
}

// --- snapshots ----------------------------------------------------------------------------------

void SimCoordinator::On(const coordinator::OpenSnapshots& action) {
  Later(cluster_->world().Latency(), coordinator::SnapshotsOpened{action.run_id, absl::OkStatus()});
}

void SimCoordinator::On(const coordinator::BeginSnapshot& action) {
  World& world = cluster_->world();
  coordinator::SnapshotBegun begun{action.run_id, action.step, absl::UnknownError("")};
  const auto there = cluster_->disk().folders.find(PathOf(action.run_id, action.step));
  if (there != cluster_->disk().folders.end() && there->second.complete) {
    begun.folder = absl::AlreadyExistsError("it was completed by a coordinator that died");
  } else if (cluster_->DiskIsFull(NameOf(action.run_id), action.step)) {
    begun.folder = absl::ResourceExhaustedError("the disk is full");
  } else {
    const std::string path =
        absl::StrCat("/ckpt/", NameOf(action.run_id), "/.tmp-", boot_, "-", ++last_folder_);
    cluster_->disk().folders[path].step = action.step;
    folders_[action.run_id] = path;
    begun.folder = path;
  }
  Later(world.Latency(), begun);
}

void SimCoordinator::On(const coordinator::CompleteSnapshot& action) {
  World& world = cluster_->world();
  coordinator::SnapshotCompleted completed{action.run_id, action.step, {}};
  v1::CheckpointRecord& record = completed.record;
  record.set_step(action.step);
  record.set_path(PathOf(action.run_id, action.step));
  const Folder& written = cluster_->disk().folders[folders_[action.run_id]];
  Folder whole{true, action.step, {}, {}};
  for (const v1::SnapshotReport& report : action.files) {
    if (!report.problem().empty() || report.step() != action.step) {
      world.Violate("snapshots", absl::StrCat("step ", action.step, " is to be completed with ",
                                              report.ShortDebugString()));
    }
    const auto file = written.files.find(report.file());
    if (file == written.files.end()) {
      world.Violate("snapshots", absl::StrCat("step ", action.step, " is to be completed without ",
                                              report.file()));
      return;
    }
    for (const auto& [chunk, state] : file->second) whole.chunks[chunk] = state;
  }
  const Reference& reference = cluster_->reference(NameOf(action.run_id));
  for (size_t chunk = 0; chunk < reference.table().chunks.size(); ++chunk) {
    const auto found = whole.chunks.find(static_cast<uint32_t>(chunk));
    if (found != whole.chunks.end() && found->second == reference.State(action.step)[chunk]) {
      continue;
    }
    world.Violate("snapshots", absl::StrCat("of step ", action.step, " chunk ", chunk, " is ",
                                            found == whole.chunks.end() ? "missing" : "wrong"));
  }
  if (action.next_sample != reference.NextSample(action.step) ||
      action.samples != Reference::kSamples) {
    world.Violate("snapshots", absl::StrCat("of step ", action.step, " have next_sample ",
                                            action.next_sample, " of ", action.samples));
  }
  if (cluster_->DiskIsFull(NameOf(action.run_id), action.step)) {
    record.set_message("the disk is full");
  } else {
    record.set_complete(true);
    record.set_bytes(1000);
    cluster_->disk().folders[record.path()] = std::move(whole);
  }
  Later(world.Between(absl::Milliseconds(1), absl::Seconds(1)), completed);
}

void SimCoordinator::On(const coordinator::AbandonSnapshot& action) {
  coordinator::SnapshotCompleted completed{action.run_id, action.step, {}};
  completed.record.set_step(action.step);
  completed.record.set_message(action.reason);
  Later(cluster_->world().Latency(), completed);
}

}  // namespace zeroshard::simulator
