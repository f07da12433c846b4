// A worker as the coordinator sees it: it takes an assignment, meets its peers through keys and
// barriers, reports steps and its end, and repeats whatever a dead coordinator did not answer.
#pragma once

#include <string>

#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {

class SimWorker {
 public:
  SimWorker(Harness* harness, std::string name) : h_(harness), name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  bool busy() const { return phase_ != Phase::kIdle; }

  // One thing at most; call it again and again.
  void Act() {
    FakeMember& me = h_->member(name_);
    if (boots_ != h_->boots() || me.session == 0) {
      boots_ = h_->boots();
      pending_ = 0;
      h_->Connect(name_, busy());
      return;
    }
    if (me.Last(v1::CoordinatorMessage::kRefused) != nullptr) {  // fenced: a new incarnation
      phase_ = Phase::kIdle;
      h_->Idle(name_);
      const std::string host = me.hello.host();  // Join starts `me` afresh
      h_->Join(name_, host);
      run_id_.clear();
      return;
    }
    if (!busy()) {
      if (!me.assign || me.assign->run_id() == run_id_) return h_->Beat(name_);
      run_id_ = me.assign->run_id();
      phase_ = Phase::kPut;
      reported_ = me.assign->first_step() - 1;
      return h_->Work(name_, reported_, "loading");
    }
    if (Stopped(me)) return Leave();
    if (pending_ != 0) {
      if (!h_->Answered(pending_)) return h_->Beat(name_);
      const absl::Status status = h_->Answer(pending_).status;
      pending_ = 0;
      if (status.ok()) {
        Advance(me);
      } else if (status.code() != absl::StatusCode::kDeadlineExceeded) {
        return Leave();
      }
    }
    Ask(me);
  }

 private:
  enum class Phase { kIdle, kPut, kGet, kStart, kSteps, kFinish, kEnd };

  static bool IsRoot(const FakeMember& me) { return me.assign->rank() == 0; }

  bool Stopped(const FakeMember& me) const {
    const v1::CoordinatorMessage* stop = me.Last(v1::CoordinatorMessage::kStop);
    return stop != nullptr && stop->stop().run_id() == run_id_;
  }

  void Leave() {
    phase_ = Phase::kIdle;
    pending_ = 0;
    h_->Idle(name_);
  }

  void Advance(const FakeMember& me) {
    switch (phase_) {
      case Phase::kPut:
        phase_ = Phase::kGet;
        break;
      case Phase::kGet:
        phase_ = Phase::kStart;
        break;
      case Phase::kStart:
        phase_ = IsRoot(me) ? Phase::kSteps : Phase::kFinish;
        break;
      case Phase::kSteps:
        if (++reported_ == me.assign->spec().steps()) phase_ = Phase::kFinish;
        break;
      case Phase::kFinish:
        phase_ = Phase::kEnd;
        break;
      default:
        phase_ = Phase::kIdle;
        break;
    }
  }

  void Ask(const FakeMember& me) {
    const uint32_t rank = me.assign->rank();
    const uint32_t next = (rank + 1) % me.assign->world_size();
    switch (phase_) {
      case Phase::kPut:
        pending_ = h_->Put(name_, absl::StrCat("address/", rank), name_);
        break;
      case Phase::kGet:
        pending_ = h_->Get(name_, absl::StrCat("address/", next));
        break;
      case Phase::kStart:
        pending_ = h_->Arrive(name_, "start");
        break;
      case Phase::kSteps:
        pending_ = h_->Steps(name_, reported_ + 1, reported_ + 1);
        break;
      case Phase::kFinish:
        pending_ = h_->Arrive(name_, "finish", absl::Minutes(10));
        break;
      case Phase::kEnd:
        pending_ = h_->End(name_);
        break;
      case Phase::kIdle:
        h_->Idle(name_);
        break;
    }
  }

  Harness* const h_;
  const std::string name_;
  Phase phase_ = Phase::kIdle;
  std::string run_id_;
  RequestId pending_ = 0;
  uint64_t reported_ = 0;
  int boots_ = 1;
};

}  // namespace zeroshard::coordinator
