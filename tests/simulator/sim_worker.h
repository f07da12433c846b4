// A worker's process: one rank of one generation at a time, which follows the protocol of an
// offloaded job: pull, meet, push, commit, pull. Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/simulator/cluster.h"

namespace zeroshard::simulator {

class SimWorker : public Process {
 public:
  using Process::Process;
  // Also while it is stopped.
  bool HoldsFolder(const std::string& run_id) const {
    return alive() && rank_ != nullptr && rank_->holds_folder && rank_->assign.run_id() == run_id;
  }

 private:
  // Elements of a chunk that this rank owns.
  struct Part {
    uint32_t chunk = 0;
    uint32_t begin = 0, count = 0;
  };
  struct Rank {
    v1::Assign assign;
    v1::Fence fence;
    v1::Progress progress;
    std::vector<Part> parts;
    uint64_t step = 0;  // of the version that it has, or is pulling
    uint64_t evaluated =
        0;            // the last step whose loss on the validation set is none of its business
    size_t left = 0;  // pulls or pushes that are on their way
    std::map<uint32_t, std::pair<v1::StateVersion, uint64_t>> chunks;  // its own, then all
    std::vector<v1::StepRecord> unreported;
    std::vector<v1::CheckpointRecord> unsaid;  // likewise; of a job whose state is on its ranks
    bool reporting = false;
    bool commits = false;  // once a loss on the validation set is reported
    bool started = false;
    bool holds_folder = false;  // of checkpoints
    bool finished = false;      // the last step is done
    absl::Duration since;       // what it waits for was begun
  };
  using Then = std::function<void(Rank&)>;

  void OnMessage(const v1::CoordinatorMessage& message) override;
  const v1::Fence* Running() const override { return rank_ == nullptr ? nullptr : &rank_->fence; }
  const v1::Progress* ProgressNow() const override {
    return rank_ == nullptr ? nullptr : &rank_->progress;
  }
  // In this process while that rank goes on.
  std::function<void()> If(Then then);
  void Phase(const std::string& phase);
  // Ends the rank where it is in the same phase after so long: a collective's or a store's
  // deadline.
  void Watch(absl::Duration limit, absl::Status status);

  void Begin(const v1::Assign& assign);
  void Pull(uint64_t step);
  void PullPart(const Part& part, int tries);
  void Gather();
  void Compute();
  void Evaluate();
  void Evaluated();
  void Push();
  void PushPart(const Part& part, const v1::StoreMap::Store& store, int tries);
  void Pushed();
  void Commit();
  void OnCommitted(const v1::StepDecision& decision);
  void Report();
  void Barrier(const std::string& name, Then then);
  // All ranks come to the same point.
  void Meet(const std::string& what, Then then);

  // sim_training.cc: a job whose state is on its ranks.
  void Load();
  void Train();
  void Save();
  void Complete();
  void Finish();
  void End(const absl::Status& status);
  void SendEnd(v1::ReportEndRequest body, int tries);

  const Reference& reference() const { return cluster_->reference(rank_->assign.job()); }
  std::string Key(const std::string& what) const;

  std::shared_ptr<Rank> rank_;
};

}  // namespace zeroshard::simulator
