// How operations end that do not end by themselves.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "worker/comm/arguments.h"
#include "worker/comm/nccl/nccl_errors.h"
#include "worker/comm/nccl/nccl_queue.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(2);
// How long the launching thread may take to leave NCCL before it is aborted under its feet.
constexpr absl::Duration kLeaveCall = absl::Seconds(1);

}  // namespace

void NcclQueue::Watch() {
  api_->EnterThread();
  for (;;) {
    OperationPtr oldest;
    {
      absl::MutexLock lock(&mutex_);
      while (!stop_ && failed_.ok() && operations_.empty()) wake_.Wait(&mutex_);
      if (!failed_.ok() || (stop_ && operations_.empty())) break;
      oldest = operations_.front();
    }
    if (oldest->Done()) {
      absl::MutexLock lock(&mutex_);
      if (!failed_.ok()) break;
      operations_.pop_front();
      --taken_;
      continue;
    }
    const absl::Status wrong = Examine(oldest);
    if (!wrong.ok()) {
      Fail(Prefixed(oldest->what(), wrong));
      break;
    }
    absl::MutexLock lock(&mutex_);
    if (failed_.ok()) wake_.WaitWithTimeout(&mutex_, kTick);
  }
  if (broken_) {
    EndAll();
  } else {
    Leave();
  }
}

absl::Status NcclQueue::Examine(const OperationPtr& oldest) {
  if (absl::StatusOr<NcclResult> state = State(); !state.ok()) return state.status();
  if (absl::Status status = ExamineMark(*oldest); !status.ok()) return status;
  const Event before = oldest->after();
  if (!before.Done()) return absl::OkStatus();  // this rank's own work still
  if (absl::Status status = before.Wait(); !status.ok()) {
    return Prefixed("the work before it failed", status);
  }
  if (!options_.order->Reached(oldest->place_)) return absl::OkStatus();
  return ExamineTime(oldest);
}

// What the GPU says.
absl::Status NcclQueue::ExamineMark(NcclOperation& oldest) {
  absl::MutexLock lock(&oldest.mutex_);
  if (oldest.finished_ || oldest.end_ == nullptr) return absl::OkStatus();
  return api_->Reached(oldest.end_).status();
}

absl::Status NcclQueue::ExamineTime(const OperationPtr& oldest) {
  const Clock::time_point now = Clock::now();
  if (turn_ != oldest) {
    turn_ = oldest;
    turn_began_ = now;
  }
  const Clock::duration waited = now - turn_began_;
  const absl::Duration limit = options_.operation_timeout;
  if (absl::FromChrono(waited) < limit) return absl::OkStatus();
  const Presence* const presence = options_.presence.get();
  if (presence != nullptr && absl::FromChrono(presence->Counted(turn_began_)) < limit) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "waited ", absl::FormatDuration(absl::Trunc(absl::FromChrono(waited), absl::Milliseconds(1))),
      " for the other ranks (the limit is ", absl::FormatDuration(limit),
      "); NCCL does not tell which of them is late: the one whose last progress is oldest"));
}

void NcclQueue::EndAll() {
  const absl::Status failed = Failure();
  const std::string why(failed.message());
  AwaitLauncher();
  // Whoever is in a call for longer than that is what the abort is for.
  const bool locked = comm_mutex_.TryLock();
  NcclComm* const comm = comm_.exchange(nullptr);
  if (locked) comm_mutex_.Unlock();
  bool ended = true;
  if (comm != nullptr) ended = AbortComm(api_.get(), comm, options_.ending, options_.who, why);
  ended = ended && AwaitLauncher();
  if (ended && !DrainStream()) {
    options_.ending.exit_process(absl::StrCat(
        options_.who, ": the GPU still works on collectives ",
        absl::FormatDuration(options_.ending.timeout), " after they were aborted because of: ", why,
        "; the process exits, and whoever supervises it starts it again"));
  }
  std::deque<OperationPtr> rest;
  {
    absl::MutexLock lock(&mutex_);
    rest.swap(operations_);
    taken_ = 0;
  }
  for (const OperationPtr& operation : rest) {
    const bool culprit = why.starts_with(operation->what());
    operation->Finish(culprit ? failed : Prefixed(operation->what(), failed));
  }
}

bool NcclQueue::AwaitLauncher() {
  const absl::Time until = absl::Now() + kLeaveCall;
  absl::MutexLock lock(&mutex_);
  while (launching_) {
    if (wake_.WaitWithDeadline(&mutex_, until)) return !launching_;
  }
  return true;
}

bool NcclQueue::DrainStream() {
  std::deque<OperationPtr> operations;
  {
    absl::MutexLock lock(&mutex_);
    operations = operations_;
  }
  absl::StatusOr<NcclMark*> mark = api_->Mark(stream_);
  if (!mark.ok()) return true;  // a device that failed runs nothing
  Clock::time_point began = Clock::now();
  bool drained = false;
  for (Backoff backoff; !drained;) {
    const absl::StatusOr<bool> reached = api_->Reached(*mark);
    drained = !reached.ok() || *reached;
    if (drained) break;
    // What is before an operation is this rank's own work and has all the time it needs.
    for (const OperationPtr& operation : operations) {
      if (operation->Launched() && !operation->after().Done()) began = Clock::now();
    }
    if (absl::FromChrono(Clock::now() - began) > options_.ending.timeout) break;
    absl::SleepFor(backoff.Next());
  }
  api_->FreeMark(*mark);
  return drained;
}

// The others' last kernels may still read what this rank's communicator holds, so it waits for
// them a little. A rank that does not come is no reason to stay.
void NcclQueue::Leave() {
  NcclComm* const comm = comm_.exchange(nullptr);
  if (comm == nullptr) return;
  NcclResult state = api_->Finalize(comm);
  const Clock::time_point began = Clock::now();
  for (Backoff backoff; state == NcclResult::kInProgress || state == NcclResult::kSuccess;) {
    if (api_->AsyncError(comm, &state) != NcclResult::kSuccess) break;
    if (state != NcclResult::kInProgress) break;
    if (absl::FromChrono(Clock::now() - began) > options_.ending.grace) break;
    absl::SleepFor(backoff.Next());
  }
  if (state != NcclResult::kSuccess) {
    AbortComm(api_.get(), comm, options_.ending, options_.who,
              "the communicator is being destroyed");
    return;
  }
  const bool destroyed = CallWithin(options_.ending.timeout, [api = api_, comm] {
    api->EnterThread();
    api->Destroy(comm);
  });
  if (!destroyed) {
    options_.ending.exit_process(absl::StrCat(
        options_.who, ": ncclCommDestroy did not return within ",
        absl::FormatDuration(options_.ending.timeout),
        " though all collectives are done; the process exits, and whoever supervises it starts it "
        "again"));
  }
}

}  // namespace zeroshard
