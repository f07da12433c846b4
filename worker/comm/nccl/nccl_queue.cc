#include "worker/comm/nccl/nccl_queue.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/comm/arguments.h"
#include "worker/comm/nccl/nccl_errors.h"

namespace zeroshard {

NcclQueue::NcclQueue(std::shared_ptr<NcclApi> api, NcclComm* comm, NcclStream* stream,
                     NcclQueueOptions options)
    : api_(std::move(api)),
      stream_(stream),
      options_(std::move(options)),
      comm_(comm),
      single_(comm == nullptr),
      launcher_([this] { LaunchAll(); }),
      watcher_([this] { Watch(); }) {}

NcclQueue::~NcclQueue() {
  OperationPtr last;
  {
    absl::MutexLock lock(&mutex_);
    if (!operations_.empty()) last = operations_.back();
  }
  if (last != nullptr && !last->Done()) {
    Fail(absl::AbortedError("the communicator is being destroyed"));
  }
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
    wake_.SignalAll();
  }
  watcher_.join();
  launcher_.join();
  api_->DeleteStream(stream_);
}

Event NcclQueue::Enqueue(std::string what, const Event& after, std::function<absl::Status()> body,
                         std::function<void()> succeeded) {
  auto operation = std::make_shared<NcclOperation>(this, api_, std::move(what), after,
                                                   std::move(body), std::move(succeeded));
  {
    absl::MutexLock lock(&mutex_);
    if (failed_.ok()) {
      operation->place_ = options_.order->Take();
      operations_.push_back(operation);
      wake_.SignalAll();
    } else {
      operation->Finish(
          Prefixed(absl::StrCat(operation->what(), ": not started, the communicator failed before"),
                   failed_));
    }
  }
  return api_->EventOf(std::move(operation));
}

void NcclQueue::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (!failed_.ok()) return;
  failed_ = status;
  broken_ = true;
  // These have not touched their memory, and never will.
  for (size_t i = taken_; i < operations_.size(); ++i) {
    options_.order->Leave(operations_[i]->place_);
    operations_[i]->Finish(
        Prefixed(absl::StrCat(operations_[i]->what(), ": not started"), failed_));
  }
  operations_.resize(taken_);
  wake_.SignalAll();
}

absl::Status NcclQueue::Failure() const {
  absl::MutexLock lock(&mutex_);
  return failed_;
}

void NcclQueue::LaunchAll() {
  api_->EnterThread();
  for (;;) {
    OperationPtr operation;
    {
      absl::MutexLock lock(&mutex_);
      while (!stop_ && failed_.ok() && taken_ == operations_.size()) wake_.Wait(&mutex_);
      if (stop_ || !failed_.ok()) return;
      operation = operations_[taken_++];
      launching_ = true;
    }
    const absl::Status status = Launch(*operation);
    options_.order->Leave(operation->place_);
    if (!status.ok()) Fail(Prefixed(operation->what(), status));
    absl::MutexLock lock(&mutex_);
    launching_ = false;
    wake_.SignalAll();
  }
}

absl::Status NcclQueue::Launch(NcclOperation& operation) {
  if (absl::Status status = AwaitTurn(operation); !status.ok()) return status;
  if (absl::Status status = AwaitBefore(operation.after()); !status.ok()) return status;
  absl::StatusOr<NcclMark*> begin = api_->Mark(stream_);
  if (!begin.ok()) return begin.status();
  absl::Status status;
  const auto body = std::exchange(operation.body_, nullptr);
  if (body) status = body();
  absl::StatusOr<NcclMark*> end = nullptr;
  if (status.ok()) {
    end = api_->Mark(stream_);
    status = end.status();
  }
  if (status.ok()) {
    operation.SetLaunched(*begin, *end);
  } else {
    api_->FreeMark(*begin);
  }
  return status;
}

absl::Status NcclQueue::AwaitTurn(const NcclOperation& operation) {
  for (Backoff backoff; !options_.order->Await(operation.place_, backoff.Next());) {
    if (absl::Status status = Failure(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status NcclQueue::AwaitBefore(const Event& after) {
  for (Backoff backoff; !after.Done();) {
    const absl::StatusOr<bool> by_stream = api_->WaitFor(stream_, after);
    if (!by_stream.ok()) return by_stream.status();
    if (*by_stream) return absl::OkStatus();
    absl::MutexLock lock(&mutex_);
    if (!failed_.ok()) return failed_;
    wake_.WaitWithTimeout(&mutex_, backoff.Next());
  }
  const absl::Status status = after.Wait();
  return status.ok() ? status : Prefixed("the work before it failed", status);
}

absl::Status NcclQueue::Group(const std::function<NcclResult(NcclComm*)>& calls) {
  return Call([&](NcclComm* comm) {
    NcclResult result = api_->GroupStart();
    if (result != NcclResult::kSuccess) return result;
    result = calls(comm);
    const NcclResult ended = api_->GroupEnd();
    if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) result = ended;
    return result;
  });
}

absl::Status NcclQueue::Call(const std::function<NcclResult(NcclComm*)>& call) {
  {
    absl::MutexLock lock(&comm_mutex_);
    NcclComm* const comm = comm_;
    if (broken_ || comm == nullptr) return Failure();
    const NcclResult result = call(comm);
    if (result != NcclResult::kSuccess && result != NcclResult::kInProgress) {
      return NcclError(api_.get(), result, comm, "NCCL");
    }
  }
  return AwaitReady();
}

absl::Status NcclQueue::AwaitReady() {
  for (Backoff backoff;;) {
    absl::StatusOr<NcclResult> state = State();
    if (!state.ok()) return state.status();
    if (*state == NcclResult::kSuccess) return absl::OkStatus();
    absl::MutexLock lock(&mutex_);
    if (!failed_.ok()) return failed_;
    wake_.WaitWithTimeout(&mutex_, backoff.Next());
  }
}

absl::Status NcclQueue::AwaitStream() {
  absl::StatusOr<NcclMark*> mark = api_->Mark(stream_);
  if (!mark.ok()) return mark.status();
  absl::StatusOr<bool> reached = false;
  absl::Status status;
  for (Backoff backoff; status.ok();) {
    reached = api_->Reached(*mark);
    status = reached.status();
    if (!status.ok() || *reached) break;
    absl::MutexLock lock(&mutex_);
    status = failed_;
    if (status.ok()) wake_.WaitWithTimeout(&mutex_, backoff.Next());
  }
  api_->FreeMark(*mark);
  return status;
}

// kInProgress also where another thread is in a call.
absl::StatusOr<NcclResult> NcclQueue::State() const {
  if (single_) return NcclResult::kSuccess;
  if (!comm_mutex_.TryLock()) return NcclResult::kInProgress;
  NcclResult state = NcclResult::kSuccess;
  absl::Status status;
  if (NcclComm* const comm = comm_; comm != nullptr) {
    const NcclResult asked = api_->AsyncError(comm, &state);
    if (asked != NcclResult::kSuccess && asked != NcclResult::kInProgress) state = asked;
    if (state != NcclResult::kSuccess && state != NcclResult::kInProgress) {
      status = NcclError(api_.get(), state, comm, "NCCL");
    }
  }
  comm_mutex_.Unlock();
  if (!status.ok()) return status;
  return state;
}

// An error stays for the watching thread to find: an operation's own lock is held here.
bool NcclQueue::Succeeded(NcclMark* end, const Event& after) const {
  const absl::StatusOr<bool> reached = api_->Reached(end);
  if (!reached.ok() || !*reached) return false;
  if (!after.Wait().ok()) return false;
  return State().ok() && !broken_;
}

void NcclQueue::CountBusy(NcclMark* begin, NcclMark* end) {
  busy_nanos_ += static_cast<int64_t>(1e9 * api_->Seconds(begin, end));
}

}  // namespace zeroshard
