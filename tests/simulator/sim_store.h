// A store's process: carries out the orders of its JobControls with time passing between, over
// state that is a hash a chunk. Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "shard_store/core/job_control.h"
#include "tests/simulator/cluster.h"

namespace zeroshard::simulator {

class SimStore : public Process {
 public:
  // How long it waits for a store that it copies from. Those that wait for ever need the
  // coordinator to tell them what to do instead.
  SimStore(Cluster* cluster, v1::Hello hello, absl::Duration patience)
      : Process(cluster, std::move(hello)), patience_(patience) {}

  struct Job {
    explicit Job(const std::string& run_id) : control(run_id) {}
    store::JobControl control;
    std::map<uint32_t, uint64_t> state;  // by chunk
    std::vector<uint32_t> kept;          // of those, since before the latest load
    struct Staged {
      uint32_t count = 0;
      uint64_t generation = 0;
      uint64_t gradient = 0;
    };
    std::map<uint32_t, std::map<uint32_t, Staged>> staging;  // by chunk, begin
    std::set<uint32_t> unapplied;  // chunks whose staging is still being read
    uint64_t work = 0;             // grows when what is under way is ended
    uint64_t snapshot = 0;         // likewise
    uint64_t loads = 0;
    absl::Duration ready_at;  // when the last of them was complete
    struct Pull {
      uint64_t generation, epoch, step;
      uint32_t chunk, begin, count;
      std::function<void(absl::Status, v1::StateVersion, uint64_t)> answer;
    };
    std::vector<Pull> pulls;  // that wait
    std::string sent;         // the report that was sent last on this session
  };
  const std::map<std::string, std::unique_ptr<Job>>& jobs() const { return jobs_; }

  // It ends when the coordinator lets it go.
  void AskToLeave();
  bool let_go() const { return let_go_; }
  // Its disk did not take what this process was told to load.
  bool refused() const { return refused_; }
  const Job* Find(const std::string& run_id) const;

  // --- what ranks ask for; answered in this process's time ---
  // The status says what JobControl::CheckPush does.
  absl::Status Push(const std::string& run_id, uint64_t generation, uint64_t epoch, uint64_t step,
                    uint32_t chunk, uint32_t begin, uint32_t count, uint64_t gradient);
  void PullChunk(const std::string& run_id, Job::Pull pull);
  // What another store copies.
  absl::StatusOr<uint64_t> Copy(const std::string& run_id, const v1::StateVersion& version,
                                uint32_t chunk) const;

 private:
  void OnMessage(const v1::CoordinatorMessage& message) override;
  void OnDirective(const v1::StoreDirective& directive);
  void OnLateDirective(const v1::StoreDirective& directive);
  void CarryOut(Job& job, const store::Orders& orders);
  void Load(Job& job, const std::vector<uint32_t>& keep);
  void LoadNext(Job& job, std::vector<uint32_t> left, absl::Duration since);
  void Apply(Job& job, const v1::StepDecision& decision);
  void ApplyNext(Job& job, const v1::StepDecision& decision, std::map<uint32_t, uint64_t> gradients,
                 std::vector<uint32_t> left);
  void WriteSnapshot(Job& job, const v1::SnapshotOrder& order);
  void Digest(Job& job, uint64_t step);
  void Settle(Job& job);  // pulls that can be answered, the report
  void Violate(const std::string& invariant, const Job& job, const std::string& what);
  // In this process while the work of the job goes on.
  void Work(Job& job, absl::Duration delay, std::function<void(Job&)> what);

  const v1::Progress* ProgressNow() const override { return leaving_ ? &leaves_ : nullptr; }

  const absl::Duration patience_;
  bool leaving_ = false, let_go_ = false, refused_ = false;
  v1::Progress leaves_;
  std::map<std::string, std::unique_ptr<Job>> jobs_;
};

}  // namespace zeroshard::simulator
