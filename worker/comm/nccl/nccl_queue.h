// Operations in order on one stream, and how they end: with the GPU's work, at the deadline, with
// an error of NCCL, or with Fail. Below the collectives; knows nothing of what an operation does.
//
// Three threads take part. The launching thread puts operations on the stream, so that no caller
// waits for NCCL or for an event of the host. The watching thread looks for errors and expired
// deadlines, and after the first of either it ends everything. Whoever waits for an operation looks
// at the GPU itself.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/presence.h"
#include "worker/comm/nccl/launch_order.h"
#include "worker/comm/nccl/nccl_api.h"
#include "worker/comm/nccl/nccl_end.h"
#include "worker/comm/nccl/nccl_operation.h"

namespace zeroshard {

struct NcclQueueOptions {
  std::string who;  // "rank 1 of 4"
  absl::Duration operation_timeout;
  std::shared_ptr<const Presence> presence;  // excuses time; may be null
  NcclEnding ending;
  std::shared_ptr<LaunchOrder> order;  // of all that launches on this GPU
};

// Thread-safe, except for destruction and for Call, Group and AwaitStream, which are for bodies of
// operations.
class NcclQueue {
 public:
  // Owns `comm` (null for a single rank) and `stream` from now on.
  NcclQueue(std::shared_ptr<NcclApi> api, NcclComm* comm, NcclStream* stream,
            NcclQueueOptions options);
  // Pending operations end with ABORTED. Waits for the events that launched ones start after.
  ~NcclQueue();

  // Runs `body` once all operations before it are on the stream, all that was enqueued before it on
  // this GPU has been launched, and the stream waits for `after`.
  Event Enqueue(std::string what, const Event& after, std::function<absl::Status()> body,
                std::function<void()> succeeded);
  // Every pending and later operation ends with `status`; the first call counts.
  void Fail(const absl::Status& status);

  // One call of NCCL's that puts nothing on the stream, and the communicator is ready when this
  // returns OK.
  absl::Status Call(const std::function<NcclResult(NcclComm*)>& call);
  // One group of NCCL calls, all of which are on the stream when this returns OK.
  absl::Status Group(const std::function<NcclResult(NcclComm*)>& calls);
  // Until the stream has done all it was given.
  absl::Status AwaitStream();

  NcclStream* stream() const { return stream_; }
  double BusySeconds() const { return 1e-9 * static_cast<double>(busy_nanos_.load()); }

 private:
  friend class NcclOperation;
  using Clock = std::chrono::steady_clock;
  using OperationPtr = std::shared_ptr<NcclOperation>;

  // For operations.
  bool Succeeded(NcclMark* end, const Event& after) const;
  void CountBusy(NcclMark* begin, NcclMark* end);

  void LaunchAll();
  absl::Status Launch(NcclOperation& operation);
  // Until nothing before it on this GPU is still to be launched.
  absl::Status AwaitTurn(const NcclOperation& operation);
  // Until the stream or the host has waited for `after`.
  absl::Status AwaitBefore(const Event& after);
  // Until the last group is on the stream.
  absl::Status AwaitReady();
  absl::Status Failure() const;

  void Watch();
  // What is wrong now with the communicator or with the oldest operation.
  absl::Status Examine(const OperationPtr& oldest);
  absl::Status ExamineMark(NcclOperation& oldest);
  absl::Status ExamineTime(const OperationPtr& oldest);
  absl::StatusOr<NcclResult> State() const;

  void EndAll();
  // The launching thread is out of NCCL; false after a second.
  bool AwaitLauncher();
  // The stream is empty; false at the deadline.
  bool DrainStream();
  void Leave();

  const std::shared_ptr<NcclApi> api_;
  NcclStream* const stream_;
  const NcclQueueOptions options_;
  std::atomic<int64_t> busy_nanos_{0};

  // Held for each call on the communicator, never while waiting.
  mutable absl::Mutex comm_mutex_;
  std::atomic<NcclComm*> comm_;  // null once it is being ended, and for a single rank
  const bool single_;

  std::atomic<bool> broken_{false};  // failed_ is set
  mutable absl::Mutex mutex_;
  absl::CondVar wake_;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<OperationPtr> operations_ ABSL_GUARDED_BY(mutex_);  // not known to have ended
  size_t taken_ ABSL_GUARDED_BY(mutex_) = 0;  // of these, by the launching thread
  bool launching_ ABSL_GUARDED_BY(mutex_) = false;

  // The watching thread's: since when it is the oldest operation's turn.
  OperationPtr turn_;
  Clock::time_point turn_began_;

  std::thread launcher_;
  std::thread watcher_;
};

}  // namespace zeroshard
