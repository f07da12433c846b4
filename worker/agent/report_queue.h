// What rank 0 reports, on its way to the coordinator: steps, checkpoints and samples. Training
// never waits for it, until so much has piled up that all ranks hold.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <variant>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/member/cluster_client.h"

namespace zeroshard {

// Thread-safe. `client` and `cancellation` outlive it.
class ReportQueue {
 public:
  // `on_error` is called once, on the queue's thread, when the coordinator refused a report (stale:
  // FAILED_PRECONDITION); nothing is sent after that.
  ReportQueue(ClusterClient* client, v1::Fence fence, Cancellation* cancellation,
              std::function<void(const absl::Status&)> on_error, size_t capacity = 4096);
  // Ends the thread; call Cancel on the cancellation first unless Flush was OK.
  ~ReportQueue();

  using Item = std::variant<v1::StepRecord, v1::CheckpointRecord, v1::SampleRecord>;
  // Waits for room when the queue is full, until the cancellation. Items arrive in order; of those
  // that travel together steps come before checkpoints, and these before samples.
  void Push(Item item);
  // True while more than half of the room is taken: the coordinator is away, or cannot keep up.
  bool ShouldHold() const;
  // Waits until everything pushed has been accepted. DEADLINE_EXCEEDED says how many items are
  // left; otherwise the refusal, or the cancellation.
  absl::Status Flush(absl::Duration timeout);

 private:
  void Main();

  ClusterClient* const client_;
  const v1::Fence fence_;
  Cancellation* const cancellation_;
  const std::function<void(const absl::Status&)> on_error_;
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;  // an item leaves when the coordinator has it
  absl::Status failed_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace zeroshard
