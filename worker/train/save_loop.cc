#include "worker/train/save_loop.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "worker/train/agreement.h"

namespace zeroshard {
namespace {

// How long a rank waits for its own disk before it tells the others that it still does.
constexpr absl::Duration kSlice = absl::Seconds(1);
constexpr std::chrono::milliseconds kPoll(5);

}  // namespace

SaveLoop::SaveLoop(const CheckpointerOptions& options, StepExchange* exchange, uint64_t saved_step)
    : comm_(options.comm),
      exchange_(exchange),
      dir_(options.spec.checkpoint().dir()),
      deadline_(CollectiveDeadline(options.spec)),
      saved_step_(saved_step) {}

absl::StatusOr<std::unique_ptr<SaveLoop>> SaveLoop::Create(const CheckpointerOptions& options,
                                                           StepExchange* exchange,
                                                           uint64_t saved_step) {
  std::unique_ptr<SaveLoop> loop(new SaveLoop(options, exchange, saved_step));
  ZS_ASSIGN_OR_RETURN(loop->checkpointer_, Checkpointer::Create(options));
  return loop;
}

RankFlags SaveLoop::Flags() {
  RankFlags flags;
  flags.save_state = static_cast<uint8_t>(checkpointer_->state());
  const uint64_t before = std::exchange(told_progress_, checkpointer_->progress());
  flags.save_progress = told_progress_ != before ? 1 : 0;
  return flags;
}

absl::Status SaveLoop::Advance(TrainObserver* observer) {
  ZS_RETURN_IF_ERROR(checkpointer_->Advance(exchange_->flags()));
  if (const auto record = checkpointer_->TakeRecord()) observer->OnCheckpoint(*record);
  return absl::OkStatus();
}

void SaveLoop::WaitForCopy(uint64_t step, TrainObserver* observer) {
  observer->OnProgress(step, StepPhase::kBarrier, "copying the state to be saved");
  checkpointer_->WaitForCopy();
}

absl::StatusOr<bool> SaveLoop::Wait(uint64_t step, TrainObserver* observer,
                                    const std::atomic<bool>& stop) {
  const std::string what =
      absl::StrCat("waiting for the checkpoint of step ", checkpointer_->step());
  const absl::Duration slice = std::min(kSlice, deadline_ / 4);
  absl::Time moved = absl::Now();
  // What the observer is told counts as an advance, so a disk that is stuck must not say anything.
  uint64_t seen = checkpointer_->progress();
  observer->OnProgress(step, StepPhase::kBarrier, what);
  while (!AllIdle(exchange_->flags())) {
    const absl::Time told = absl::Now();
    do {
      const uint64_t before = std::exchange(seen, checkpointer_->progress());
      if (seen != before) observer->OnProgress(step, StepPhase::kBarrier, what);
      if (stop) return absl::CancelledError("stopped");
      if (!checkpointer_->Busy() || absl::Now() - told > slice) break;
      std::this_thread::sleep_for(kPoll);
    } while (true);
    RankFlags own = Flags();
    // Rank 0's clock decides, so that all give up together.
    own.hold = IsRankZero() && absl::Now() - moved > deadline_ ? 1 : 0;
    ZS_RETURN_IF_ERROR(exchange_->ExchangeFlags(step, own));
    ZS_RETURN_IF_ERROR(Advance(observer));
    if (exchange_->flags()[0].hold != 0) return false;
    for (const RankFlags& flags : exchange_->flags())
      if (flags.save_progress != 0) moved = absl::Now();
  }
  return true;
}

absl::StatusOr<bool> SaveLoop::ExchangeAndWait(uint64_t step, TrainObserver* observer,
                                               const std::atomic<bool>& stop) {
  ZS_RETURN_IF_ERROR(exchange_->ExchangeFlags(step, Flags()));
  ZS_RETURN_IF_ERROR(Advance(observer));
  return Wait(step, observer, stop);
}

absl::StatusOr<bool> SaveLoop::Save(uint64_t step, const NextStep& next, TrainObserver* observer,
                                    const std::atomic<bool>& stop) {
  const absl::Time start = absl::Now();
  absl::Duration waited;
  if (!AllIdle(exchange_->flags())) {
    ZS_ASSIGN_OR_RETURN(const bool idle, Wait(step, observer, stop));
    waited = absl::Now() - start;
    if (!idle) {
      ReportSkipped(step, waited, observer);
      return false;
    }
  }
  observer->OnProgress(step, StepPhase::kBarrier, "saving");
  checkpointer_->Start(step, next, waited);
  saved_step_ = step;
  return true;
}

void SaveLoop::ReportSkipped(uint64_t step, absl::Duration waited, TrainObserver* observer) {
  if (!IsRankZero()) return;
  v1::CheckpointRecord record;
  record.set_step(step);
  record.set_path(absl::StrCat(dir_, "/", CheckpointName(step)));
  record.set_pause_seconds(absl::ToDoubleSeconds(waited));
  record.set_message(
      absl::StrFormat("it was left out, because nothing of the one of step %d was written for %s "
                      "(timeouts.collective_seconds). Look at the disk of %s",
                      checkpointer_->step(), absl::FormatDuration(deadline_), dir_));
  LogWarning("the checkpoint of step ", step, ": ", record.message());
  observer->OnCheckpoint(record);
}

std::string SaveLoop::NothingWritten() const {
  return absl::StrCat("nothing was written for ", absl::FormatDuration(deadline_),
                      " (timeouts.collective_seconds)");
}

absl::Status SaveLoop::Finish(uint64_t step, const NextStep& next, TrainObserver* observer,
                              const std::atomic<bool>& stop) {
  bool begun = true;
  if (saved_step_ != step) {
    ZS_ASSIGN_OR_RETURN(begun, Save(step, next, observer, stop));
  }
  if (begun && checkpointer_->step() != step) return absl::OkStatus();  // was there already
  absl::Status outcome = absl::DeadlineExceededError(NothingWritten());
  if (begun) {
    ZS_ASSIGN_OR_RETURN(const bool idle, ExchangeAndWait(step, observer, stop));
    if (idle) outcome = IsRankZero() ? checkpointer_->outcome() : absl::OkStatus();
  }
  outcome = Agree(comm_, outcome, "checkpoint");
  if (outcome.ok()) return outcome;
  return absl::Status(outcome.code(),
                      absl::StrCat("step ", step, " was trained, but its checkpoint could not be ",
                                   "written: ", outcome.message()));
}

void SaveLoop::EndPending(uint64_t step, TrainObserver* observer, const std::atomic<bool>& stop) {
  if (checkpointer_->step() == 0) return;
  const absl::StatusOr<bool> idle = ExchangeAndWait(step, observer, stop);
  if ((idle.ok() && *idle) || !IsRankZero()) return;
  LogWarning("the checkpoint of step ", checkpointer_->step(), " that was on its way was not ",
             "completed: ", idle.ok() ? NothingWritten() : std::string(idle.status().message()));
}

}  // namespace zeroshard
