// When checkpoints are begun and waited for: the training thread's side of saving, which ranks do
// together. One instance a rank, used by its training thread; every call that waits or exchanges is
// made by all ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/train/checkpointer.h"
#include "worker/train/step_stats.h"
#include "worker/train/trainer.h"

namespace zeroshard {

class SaveLoop {
 public:
  // Collective, with the errors of Checkpointer::Create. `saved_step`: whose state checkpoint.dir
  // holds already; 0: none. `exchange` outlives this.
  static absl::StatusOr<std::unique_ptr<SaveLoop>> Create(const CheckpointerOptions& options,
                                                          StepExchange* exchange,
                                                          uint64_t saved_step);

  // What this rank has to say of saving in the next exchange.
  RankFlags Flags();
  // Collective, after each exchange of flags: what they say is done.
  absl::Status Advance(TrainObserver* observer);
  // Before the state changes.
  void WaitForCopy(uint64_t step, TrainObserver* observer);

  // The state after `step` is saved, or begun to be.
  bool Saved(uint64_t step) const { return saved_step_ == step; }
  // Begins to save the state after `step`, once the save before is through. False: it was left out
  // and reported, because that one got stuck. CANCELLED: `stop`; else a collective's error.
  absl::StatusOr<bool> Save(uint64_t step, const NextStep& next, TrainObserver* observer,
                            const std::atomic<bool>& stop);
  // Waits until the checkpoint of `step` is complete, and begins it where it was not; its error on
  // all ranks.
  absl::Status Finish(uint64_t step, const NextStep& next, TrainObserver* observer,
                      const std::atomic<bool>& stop);
  // Ends what save is on its way, where training ended in `step` with an error that all ranks have.
  // Begins none; what cannot be ended is logged.
  void EndPending(uint64_t step, TrainObserver* observer, const std::atomic<bool>& stop);

 private:
  SaveLoop(const CheckpointerOptions& options, StepExchange* exchange, uint64_t saved_step);

  bool IsRankZero() const { return comm_->rank() == 0; }
  // All ranks wait together until no save is on its way. False: nothing of it moved for as long as
  // a collective may take.
  absl::StatusOr<bool> Wait(uint64_t step, TrainObserver* observer, const std::atomic<bool>& stop);
  // After an exchange of flags, for what the latest said may be older than the save.
  absl::StatusOr<bool> ExchangeAndWait(uint64_t step, TrainObserver* observer,
                                       const std::atomic<bool>& stop);
  void ReportSkipped(uint64_t step, absl::Duration waited, TrainObserver* observer);
  std::string NothingWritten() const;

  Communicator* const comm_;
  StepExchange* const exchange_;
  const std::string dir_;
  const absl::Duration deadline_;  // of a collective
  uint64_t saved_step_;
  uint64_t told_progress_ = 0;
  std::unique_ptr<Checkpointer> checkpointer_;
};

}  // namespace zeroshard
