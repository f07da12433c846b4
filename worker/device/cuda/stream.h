// A CUDA stream, and how other code puts its work on it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/device/cuda/context.h"
#include "worker/device/cuda/event.h"
#include "worker/device/device.h"

namespace zeroshard::cuda {

// What work does that follows an event of the host (a pull, Gloo), or one of the GPU that is itself
// held back by the host:
//   kBlock  the caller waits until it can be enqueued. The compute stream: kernels are launched on
//           it directly, and must not overtake what was asked for before.
//   kDefer  it and all that follows wait in a queue, which a thread of the stream empties.
enum class HostEvents { kBlock, kDefer };

// Work runs in the order in which it was asked for, deferred or not. An event of a GPU that is
// recorded is waited for on the GPU. Thread-safe, except for destruction, which waits until all
// work has run.
class CudaStream : public Stream {
 public:
  // Where the stream cannot be made every event of it has that error.
  CudaStream(std::shared_ptr<Context> context, const std::string& name, bool high_priority,
             HostEvents host_events);
  ~CudaStream() override;

  // Host memory that is not of Device::AllocateHost makes the call wait for the copy.
  Event Copy(void* to, const void* from, size_t bytes, const Event& after = {}) override;
  absl::Status WaitFor(const Event& event) override;
  Event Record() override;

  // Enqueues what `work` enqueues on the stream that it is given, after everything before it and
  // after `after`; where that failed `work` does not run. `work` runs on this thread or the
  // stream's, with the device current; it must not wait and must not use this object. The event has
  // the first error of `after` and of `work`.
  using Work = std::function<absl::Status(StreamHandle)>;
  Event Submit(Work work, const Event& after = {});

  // A cudaStream_t of this device, for work that the caller enqueues by itself: waits until what is
  // deferred has been enqueued. The error of making the stream.
  absl::StatusOr<StreamHandle> handle();
  // An error of such work: the next Record has it.
  void AddError(const absl::Status& status);

 private:
  struct Item {
    enum Kind { kWork, kWait, kRecord } kind = kWork;
    Work work = nullptr;
    Event after = {};
    std::shared_ptr<CudaEvent> done = nullptr;
  };

  Event Push(Item item);
  void Enqueue(Item* item);
  absl::Status EnqueueAfter(const Event& after);
  void Finish(Item* item, absl::Status status, std::vector<Event> sources);
  void Loop();

  const std::shared_ptr<Context> context_;
  const std::string name_;
  const HostEvents host_events_;
  absl::Status made_;
  StreamHandle stream_ = nullptr;

  // Also held while work is enqueued: a wait, its work and its event must not be torn apart.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> deferred_;  // not empty while its first item is on its way
  bool closing_ = false;
  absl::Status first_error_;    // since the last Record
  std::vector<Event> sources_;  // of work since the last Record
  std::thread thread_;          // from the first deferred item on
};

// Null where the stream is not of a CUDA device.
inline CudaStream* AsCudaStream(Stream* stream) { return dynamic_cast<CudaStream*>(stream); }

}  // namespace zeroshard::cuda
