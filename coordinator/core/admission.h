// Whether workers have the memory that a job's ranks take, and what would have to be changed where
// they have not. Pure; thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "zeroshard/v1/cluster.pb.h"
#include "zeroshard/v1/job.pb.h"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard::coordinator {

// Bytes of one rank: its plan, and what it sets aside in host memory for checkpoints.
struct RankNeed {
  v1::ShardPlan plan;
  uint64_t copy = 0;
  uint64_t Device() const;  // parameters, gradients, optimizer, activations
};
// By rank. `plan` is PlanShards of the specification.
std::vector<RankNeed> NeedsOf(const v1::JobSpec& spec, const std::vector<v1::ShardPlan>& plan);

// What a worker has for one rank. A CPU worker's device is its host's memory, which all of the
// host's share; a GPU is its worker's alone. 0: unknown, which counts as enough.
struct WorkerRoom {
  std::string name, host;
  bool on_host = true;
  uint64_t device = 0;
  uint64_t host_memory = 0;
};
WorkerRoom RoomOf(const v1::Hello& hello);

// What ranks that were placed have taken of these workers and of their hosts' memory.
class RoomLedger {
 public:
  explicit RoomLedger(const std::vector<WorkerRoom>& rooms);
  size_t size() const { return rooms_.size(); }
  bool taken(size_t worker) const { return taken_[worker]; }
  // False, and nothing is taken, where the worker has a rank already or has no room for this one.
  bool Take(size_t worker, const RankNeed& need);
  void GiveBack(size_t worker, const RankNeed& need);

 private:
  const std::vector<WorkerRoom> rooms_;
  const std::map<std::string, uint64_t> limits_;  // of hosts; 0: unknown
  std::map<std::string, uint64_t> used_;          // of hosts
  std::vector<bool> taken_;
};

// The workers that take ranks 0, 1, ...: the first in the given order that have room beside those
// that were taken before. Empty: not all ranks find one.
std::vector<size_t> PickWorkers(const std::vector<RankNeed>& needs,
                                const std::vector<WorkerRoom>& rooms);

// No choice among these could hold the job, however it is made. False where there are fewer of them
// than ranks: who knows what comes.
bool CannotHold(const std::vector<RankNeed>& needs, const std::vector<WorkerRoom>& rooms);

// "rank 0 takes 6.0 GB (parameters 2.0 GB, optimizer 4.0 GB) and host-a has 4.0 GB for its 2
// workers": what the largest rank takes and what is there, three places at most.
std::string DescribeShortage(const std::vector<RankNeed>& needs,
                             const std::vector<WorkerRoom>& rooms);

// The change of fewest keys with which the job fits those workers, as arguments of `zeroshard
// submit`: "--set zero_optimization.stage=3". `stores_hold`: whether the shard stores have room for
// a variant that is offloaded. Where no change of the job does, how many more workers would, at
// stage 3. Empty: nothing was found, or the specification has no model.
std::string SmallestChange(const v1::JobSpec& spec, const std::vector<WorkerRoom>& rooms,
                           const std::function<bool(const v1::JobSpec&)>& stores_hold);

}  // namespace zeroshard::coordinator
