#include "coordinator/core/admission.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/plan/job_mesh.h"
#include "common/plan/offload.h"
#include "common/plan/planner.h"
#include "coordinator/core/placement.h"
#include "coordinator/core/stores.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

constexpr uint32_t kMostWorkers = 65536;  // that a job may ask for

uint64_t Added(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

// Of the memory of the worker's host.
uint64_t OfHost(const RankNeed& need, const WorkerRoom& room) {
  return room.on_host ? Added(need.Device(), need.copy) : need.copy;
}

bool FitsDevice(const RankNeed& need, const WorkerRoom& room) {
  if (room.device == 0) return true;
  return (room.on_host ? OfHost(need, room) : need.Device()) <= room.device;
}

// The largest figure that any worker of a host gave; 0: unknown.
std::map<std::string, uint64_t> HostMemory(const std::vector<WorkerRoom>& rooms) {
  std::map<std::string, uint64_t> memory;
  for (const WorkerRoom& room : rooms) {
    uint64_t& most = memory[room.host];
    most = std::max(most, room.host_memory);
  }
  return memory;
}

// Of a variant of the job; nothing where it has no plan.
std::optional<std::vector<RankNeed>> Planned(const v1::JobSpec& spec) {
  const auto plan = PlanShards(spec);
  if (!plan.ok()) return std::nullopt;
  return NeedsOf(spec, *plan);
}

struct Change {
  std::vector<std::string> keys;  // "zero_optimization.stage=3"
  v1::JobSpec spec;
};

void SetStage(uint32_t stage, Change* change) {
  change->spec.mutable_zero_optimization()->set_stage(stage);
  change->keys.push_back(absl::StrCat("zero_optimization.stage=", stage));
}

void SetCheckpointing(Change* change) {
  change->spec.set_activation_checkpointing(true);
  change->keys.push_back("activation_checkpointing=true");
}

void SetWorkers(uint32_t workers, Change* change) {
  change->spec.mutable_resources()->set_workers(workers);
  change->spec.mutable_resources()->set_min_workers(workers);
  change->keys.push_back(absl::StrCat("resources.workers=", workers));
}

void SetOffload(bool parameters, Change* change) {
  v1::ZeroSpec* zero = change->spec.mutable_zero_optimization();
  if (!IsOffloaded(change->spec)) {
    zero->mutable_offload_optimizer()->set_device("cpu");
    change->keys.push_back("zero_optimization.offload_optimizer.device=cpu");
  }
  if (!parameters || OffloadsParameters(change->spec)) return;
  const std::string& device = zero->offload_optimizer().device();
  zero->mutable_offload_param()->set_device(device);
  change->keys.push_back(absl::StrCat("zero_optimization.offload_param.device=", device));
}

// Ranks of as many data-parallel replicas as a step has micro-batches: more would have none.
uint64_t MostRanks(const v1::JobSpec& spec) {
  if (spec.train_micro_batch_size_per_gpu() == 0) return 0;
  return spec.train_batch_size() / spec.train_micro_batch_size_per_gpu() *
         static_cast<uint64_t>(RanksOfReplica(spec));
}

// What the largest rank of so many takes of its device, its host's memory and, where those are one,
// of both; UINT64_MAX: it has no plan.
uint64_t LargestRank(const v1::JobSpec& spec, bool on_host) {
  const auto of = [on_host](const RankNeed& need) {
    return on_host ? Added(need.Device(), need.copy) : need.Device();
  };
  if (RanksOfReplica(spec) == 1) {  // rank 0's shards are whole
    const auto model = MakeModelTable(spec.model());
    if (!model.ok()) return UINT64_MAX;
    const ZeroPolicy policy =
        MakeZeroPolicy(*model, MakeZeroOptions(spec, static_cast<int>(spec.resources().workers())));
    const RankPlan plan = PlanRank(*model, policy, 0);
    const uint64_t copy =
        spec.checkpoint().dir().empty() ? 0 : CheckpointCopyBytes(*model, policy, 0);
    return plan.parameters + plan.gradients + plan.optimizer + plan.activations +
           (on_host ? copy : 0);
  }
  const auto needs = Planned(spec);
  uint64_t largest = needs && !needs->empty() ? 0 : UINT64_MAX;
  for (const RankNeed& need : needs.value_or(std::vector<RankNeed>()))
    largest = std::max(largest, of(need));
  return largest;
}

// Every combination of what raises the stage, recomputes, adds workers that are there and offloads,
// fewest keys first; of as many, in that order.
std::vector<Change> Changes(const v1::JobSpec& spec, uint32_t workers_there) {
  std::vector<uint32_t> stages = {spec.zero_optimization().stage()};
  for (uint32_t stage = stages[0] + 1; stage <= 3; ++stage) stages.push_back(stage);
  std::vector<uint32_t> workers = {spec.resources().workers()};
  const uint64_t batches = MostRanks(spec);
  while (workers.back() * 2 <= std::min<uint64_t>(workers_there, batches))
    workers.push_back(workers.back() * 2);
  std::vector<Change> changes;
  for (int offload = 0; offload <= 2; ++offload) {
    for (const uint32_t count : workers) {
      for (const bool checkpointing : {false, true}) {
        for (const uint32_t stage : stages) {
          Change change{{}, spec};
          if (stage != stages[0]) SetStage(stage, &change);
          if (checkpointing) {
            if (spec.activation_checkpointing()) continue;
            SetCheckpointing(&change);
          }
          if (count != workers[0]) SetWorkers(count, &change);
          if (offload > 0) {
            if (stage == 0 || (offload == 2 && stage != 3)) continue;
            const size_t before = change.keys.size();
            SetOffload(offload == 2, &change);
            if (change.keys.size() == before) continue;
          }
          if (!change.keys.empty()) changes.push_back(std::move(change));
        }
      }
    }
  }
  std::stable_sort(changes.begin(), changes.end(),
                   [](const Change& a, const Change& b) { return a.keys.size() < b.keys.size(); });
  return changes;
}

// How many workers like the roomiest one would hold the job at stage 3, each on a host of its own.
std::string EnoughWorkers(const v1::JobSpec& spec, const std::vector<WorkerRoom>& rooms) {
  const auto size = [](const WorkerRoom& room) {
    return room.device != 0 ? room.device : room.host_memory;
  };
  const WorkerRoom& best = *std::max_element(
      rooms.begin(), rooms.end(),
      [&](const WorkerRoom& a, const WorkerRoom& b) { return size(a) < size(b); });
  const uint64_t batches = MostRanks(spec);
  Change change{{}, spec};
  SetStage(3, &change);
  if (!spec.activation_checkpointing()) SetCheckpointing(&change);
  for (uint64_t workers = spec.resources().workers() * uint64_t{2};
       workers <= std::min<uint64_t>(kMostWorkers, batches); workers *= 2) {
    Change more = change;
    SetWorkers(static_cast<uint32_t>(workers), &more);
    if (LargestRank(more.spec, best.on_host) > size(best)) continue;
    return absl::StrCat("no change of the job fits the workers that are here; ", workers,
                        " workers with ", Bytes(size(best)), " each would hold it with --set ",
                        absl::StrJoin(more.keys, " --set "));
  }
  return "";
}

}  // namespace

uint64_t RankNeed::Device() const {
  return Added(Added(plan.parameter_bytes(), plan.gradient_bytes()),
               Added(plan.optimizer_bytes(), plan.activation_bytes()));
}

std::vector<RankNeed> NeedsOf(const v1::JobSpec& spec, const std::vector<v1::ShardPlan>& plan) {
  if (plan.empty()) return {};  // nothing is known of it
  std::vector<RankNeed> needs;
  for (const v1::ShardPlan& rank : plan) needs.push_back({rank, 0});
  if (spec.checkpoint().dir().empty() || IsOffloaded(spec)) return needs;
  const absl::StatusOr<ModelTable> model = MakeModelTable(spec.model());
  const absl::StatusOr<MeshShape> mesh = MeshOf(spec, static_cast<int64_t>(needs.size()));
  if (!model.ok() || !mesh.ok()) return needs;
  const ZeroOptions options = MakeZeroOptions(spec, mesh->data);
  if (RanksOfReplica(spec) == 1) {
    const ZeroPolicy policy = MakeZeroPolicy(*model, options);
    for (size_t rank = 0; rank < needs.size(); ++rank)
      needs[rank].copy = CheckpointCopyBytes(*model, policy, static_cast<int>(rank));
    return needs;
  }
  for (int stage = 0; stage < mesh->pipeline; ++stage) {
    // All tensor ranks have one layout.
    const absl::StatusOr<StageModel> part = PartOf(spec, *model, {.pipeline = stage});
    if (!part.ok()) return needs;
    const ZeroPolicy policy = MakeZeroPolicy(part->model, options);
    for (int data = 0; data < mesh->data; ++data) {
      const uint64_t copy = CheckpointCopyBytes(part->model, policy, data);
      const int first = RankAt(*mesh, {.pipeline = stage, .data = data});
      for (int rank = first; rank < first + mesh->tensor; ++rank)
        needs[static_cast<size_t>(rank)].copy = copy;
    }
  }
  return needs;
}

WorkerRoom RoomOf(const v1::Hello& hello) {
  WorkerRoom room;
  room.name = hello.name();
  room.host = hello.host();
  room.on_host = !absl::StartsWith(hello.device(), "cuda");
  room.device = hello.device_memory_bytes();
  room.host_memory = hello.memory_bytes();
  return room;
}

RoomLedger::RoomLedger(const std::vector<WorkerRoom>& rooms)
    : rooms_(rooms), limits_(HostMemory(rooms)), taken_(rooms.size(), false) {}

bool RoomLedger::Take(size_t worker, const RankNeed& need) {
  const WorkerRoom& room = rooms_[worker];
  if (taken_[worker] || !FitsDevice(need, room)) return false;
  const uint64_t limit = limits_.at(room.host);
  uint64_t& used = used_[room.host];
  const uint64_t sum = Added(used, OfHost(need, room));
  if (limit != 0 && sum > limit) return false;
  used = sum;
  taken_[worker] = true;
  return true;
}

void RoomLedger::GiveBack(size_t worker, const RankNeed& need) {
  used_[rooms_[worker].host] -= OfHost(need, rooms_[worker]);
  taken_[worker] = false;
}

std::vector<size_t> PickWorkers(const std::vector<RankNeed>& needs,
                                const std::vector<WorkerRoom>& rooms) {
  RoomLedger ledger(rooms);
  std::vector<size_t> picked;
  for (size_t worker = 0; worker < rooms.size() && picked.size() < needs.size(); ++worker) {
    if (ledger.Take(worker, needs[picked.size()])) picked.push_back(worker);
  }
  if (picked.size() < needs.size()) picked.clear();
  return picked;
}

bool CannotHold(const std::vector<RankNeed>& needs, const std::vector<WorkerRoom>& rooms) {
  if (needs.empty() || rooms.size() < needs.size()) return false;
  // At the best each host takes the smallest ranks.
  const auto count = [&](auto&& bytes_of, uint64_t limit, size_t workers) {
    std::vector<uint64_t> bytes;
    for (const RankNeed& need : needs) bytes.push_back(bytes_of(need));
    std::sort(bytes.begin(), bytes.end());
    uint64_t sum = 0;
    size_t ranks = 0;
    for (; ranks < std::min(workers, bytes.size()); ++ranks) {
      sum = Added(sum, bytes[ranks]);
      if (limit != 0 && sum > limit) break;
    }
    return ranks;
  };
  size_t most = 0;
  for (const auto& [host, limit] : HostMemory(rooms)) {
    std::vector<const WorkerRoom*> workers;
    bool on_host = true;
    for (const WorkerRoom& room : rooms) {
      if (room.host != host) continue;
      const bool any = std::any_of(needs.begin(), needs.end(),
                                   [&](const RankNeed& need) { return FitsDevice(need, room); });
      if (!any) continue;
      workers.push_back(&room);
      on_host = on_host && room.on_host;
    }
    if (workers.empty()) continue;
    most += count(
        [on_host](const RankNeed& need) {
          return on_host ? Added(need.Device(), need.copy) : need.copy;
        },
        limit, workers.size());
  }
  return most < needs.size();
}

std::string DescribeShortage(const std::vector<RankNeed>& needs,
                             const std::vector<WorkerRoom>& rooms) {
  const auto largest =
      std::max_element(needs.begin(), needs.end(), [](const RankNeed& a, const RankNeed& b) {
        return a.Device() + a.copy < b.Device() + b.copy;
      });
  const v1::ShardPlan& plan = largest->plan;
  std::vector<std::string> kinds;
  for (const auto& [name, bytes] :
       {std::pair<const char*, uint64_t>{"parameters", plan.parameter_bytes()},
        {"gradients", plan.gradient_bytes()},
        {"optimizer", plan.optimizer_bytes()},
        {"activations", plan.activation_bytes()},
        {"a copy to write checkpoints from", largest->copy}}) {
    if (bytes != 0) kinds.push_back(absl::StrCat(name, " ", Bytes(bytes)));
  }
  std::map<std::string, std::vector<const WorkerRoom*>> hosts;
  for (const WorkerRoom& room : rooms) hosts[room.host].push_back(&room);
  const std::map<std::string, uint64_t> memory = HostMemory(rooms);
  std::vector<std::string> there;
  for (const auto& [host, workers] : hosts) {
    std::vector<std::string> devices;
    for (const WorkerRoom* worker : workers) {
      if (worker->device == 0 || (worker->on_host && worker->device >= worker->host_memory))
        continue;
      devices.push_back(absl::StrCat(worker->name, " ", Bytes(worker->device)));
    }
    there.push_back(
        absl::StrCat(host, " has ", Bytes(memory.at(host)), " for its ", workers.size(),
                     workers.size() == 1 ? " worker" : " workers",
                     devices.empty() ? "" : absl::StrCat(" (", AtMostThree(devices), ")")));
  }
  return absl::StrCat(needs.size() == 1 ? "" : absl::StrCat("of ", needs.size(), " ranks "),
                      "rank ", plan.rank(), " takes ",
                      Bytes(Added(largest->Device(), largest->copy)), " (",
                      absl::StrJoin(kinds, ", "), "), and ", AtMostThree(there));
}

std::string SmallestChange(const v1::JobSpec& spec, const std::vector<WorkerRoom>& rooms,
                           const std::function<bool(const v1::JobSpec&)>& stores_hold) {
  if (rooms.empty() || spec.train_micro_batch_size_per_gpu() == 0 ||
      !MakeModelTable(spec.model()).ok()) {
    return "";
  }
  for (const Change& change : Changes(spec, static_cast<uint32_t>(rooms.size()))) {
    const auto needs = Planned(change.spec);
    if (!needs || WorkersFor(change.spec, *needs, rooms).empty()) continue;
    if (IsOffloaded(change.spec) && !stores_hold(change.spec)) continue;
    return absl::StrCat("the smallest change that fits: --set ",
                        absl::StrJoin(change.keys, " --set "));
  }
  return EnoughWorkers(spec, rooms);
}

}  // namespace zeroshard::coordinator
