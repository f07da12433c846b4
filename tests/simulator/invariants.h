// What must hold whatever happens (architecture, section 6): looked at before every batch of the
// log and after every event.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/durable_log.h"
#include "coordinator/core/events.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::simulator {

class Cluster;

class Invariants {
 public:
  explicit Invariants(Cluster* cluster) : cluster_(cluster) {}

  // Before they are appended: what is decided must be true of the stores now (I2, I3, I7, I9, I11).
  void OnRecords(const std::vector<coordinator::LogRecord>& records);
  // Before it is sent: every store of the map has opened the generation (I4).
  void OnAssign(const v1::Assign& assign);
  // After every event of any process (I1, I8, I9).
  void Check();
  // A rank computes with these chunks' states, each at the version that it was pulled at (I5).
  void OnCompute(const std::string& job, const std::string& who, uint64_t epoch, uint64_t step,
                 const std::map<uint32_t, std::pair<v1::StateVersion, uint64_t>>& chunks);
  // A replica begins to apply (I2); its loads begin a new count.
  void OnApply(const std::string& incarnation, const std::string& run_id, uint64_t load,
               const v1::StepDecision& decision);
  void OnFault() { ++faults_; }
  // It tells of that step, further than before perhaps.
  void OnHistory(const std::string& run_id, uint64_t step);
  // After the job's end. A job that was given up after kGivesUp recoveries in a row is none of the
  // core's errors where there were as many faults since its last step.
  void CheckEnd(const v1::JobStatus& status);
  static constexpr uint64_t kGivesUp = 6;
  uint64_t given_up() const { return given_up_; }
  // Of jobs whose state is on their ranks: that went back, and that went on from a checkpoint which
  // nobody had reported with the steps before it.
  uint64_t went_back() const { return went_back_; }
  uint64_t unreported() const { return unreported_; }
  // Generations that began with a loss on the validation set which the one before owed, and losses
  // that were given up in words.
  uint64_t made_up() const { return made_up_; }
  uint64_t left_out() const { return left_out_; }

  // Rollbacks without a step lost, as what the stores that left held was saved before.
  uint64_t left() const { return left_; }
  // Jobs that ended because no store that was left took their state.
  uint64_t refused() const { return refused_; }
  uint64_t recoveries() const { return recoveries_; }
  uint64_t rollbacks() const { return rollbacks_; }
  uint64_t decisions() const { return decisions_; }
  // Rollbacks while a live store copied from one that was lost.
  uint64_t cut_copies() const { return cut_copies_; }

 private:
  struct Run {
    std::string job;
    uint64_t generation = 0;
    uint64_t epoch = 0, map_version = 0;
    bool mapped = false;
    coordinator::StoreMapRecord map;
    uint64_t committed = 0;  // in this epoch
    uint64_t faults = 0;     // that there were when a step was last committed
    uint64_t furthest = 0;   // that the history told of
    uint64_t first_step = 1;
    v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
    std::map<std::pair<uint64_t, uint64_t>, std::string> decided;  // by epoch, step
  };
  struct Counters {
    uint64_t term = 0, generation = 0, epoch = 0, map_version = 0, step = 0;
  };
  void On(const coordinator::CounterRecord& record);
  void On(const coordinator::JobRecord& record);
  void On(const coordinator::StoreMapRecord& record);
  void On(const coordinator::StepDecisionRecord& record);
  void CheckNoRoom(const coordinator::JobRecord& record);
  void CheckLost(const Run& run);
  void CheckLeft(const Run& run, uint64_t base);
  void CheckFullyStaged(const Run& run, const v1::StepDecision& decision);
  void CheckHistory(const v1::JobStatus& status);
  void Violate(const std::string& invariant, const std::string& what);

  Cluster* const cluster_;
  uint64_t term_ = 0;
  std::map<std::string, Run> runs_;
  std::map<std::pair<std::string, std::string>, Counters> stores_;  // by incarnation, run
  std::set<std::string> applied_;
  uint64_t recoveries_ = 0, rollbacks_ = 0, decisions_ = 0, faults_ = 0, given_up_ = 0;
  uint64_t cut_copies_ = 0, left_ = 0, made_up_ = 0, left_out_ = 0, refused_ = 0;
  uint64_t went_back_ = 0, unreported_ = 0;
};

}  // namespace zeroshard::simulator
