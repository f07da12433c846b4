// Memory, streams and events: what a backend must offer to everything on the right of device/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

// The kinds of zeroshard_worker_memory_bytes.
enum class MemoryKind : uint8_t { kParameters, kGradients, kOptimizer, kActivations, kBuffers };
constexpr int kMemoryKinds = 5;
const char* NameOf(MemoryKind kind);

// Bytes allocated now and at most, by kind. Thread-safe.
class MemoryAccounting {
 public:
  virtual ~MemoryAccounting() = default;
  virtual int64_t Bytes(MemoryKind kind) const = 0;
  virtual int64_t PeakBytes(MemoryKind kind) const = 0;
};

// Owns memory of a device, 64-byte aligned; movable; frees and accounts at destruction. The device
// must outlive it. Zero bytes are allowed (data() may be null then).
class Buffer {
 public:
  Buffer() = default;
  Buffer(void* data, size_t bytes, std::function<void()> free);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  std::function<void()> free_;
};

// A point in a stream. Copyable, thread-safe; an empty Event is complete and OK.
class Event {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual bool Done() const = 0;
    // Waits for the work before the event; its status is the first error of that work.
    virtual absl::Status Wait() = 0;
  };
  Event() = default;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  bool Done() const { return !state_ || state_->Done(); }
  absl::Status Wait() const { return state_ ? state_->Wait() : absl::OkStatus(); }
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

// A queue of work that runs in order: copies here, kernels through Ops, collectives through a
// Communicator. On the CPU the compute stream of a device runs inline on the caller's thread, and
// every other one is a host thread (host_stream.h). Thread-safe.
class Stream {
 public:
  virtual ~Stream() = default;
  // Copies `bytes` after everything enqueued before it and after `after`; each side is memory of
  // the device or of the host, and stays as it is until the event is done. Where `after` failed
  // nothing is copied, and the event has its error.
  virtual Event Copy(void* to, const void* from, size_t bytes, const Event& after = {}) = 0;
  // What is enqueued after this waits for `event` first, failed or not. The error of an event that
  // is known to have failed; OK also while it is under way. May block the caller where the event is
  // the host's.
  virtual absl::Status WaitFor(const Event& event) = 0;
  // All that was enqueued so far; its status is the first error of that since the last Record.
  virtual Event Record() = 0;
};

// Splits the time of a compute stream, busy or idle, into laps that follow each other without a
// gap, each counted for a label of the caller's. Nobody waits for it: a lap is known once the
// stream has passed its end. Not thread-safe; the device must outlive it.
class LapTimer {
 public:
  virtual ~LapTimer() = default;
  // Behind what the stream was given so far the lap under way ends and the next one begins.
  virtual void Begin(int label) = 0;
  // Calls `add` for each lap that is over and was not told of yet, from the oldest on.
  virtual void Collect(const std::function<void(int label, uint64_t nanoseconds)>& add) = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  // RESOURCE_EXHAUSTED names the bytes asked, those in use and the kind. Memory is zeroed.
  virtual absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) = 0;
  // Host memory that Stream::Copy moves at full speed and that collectives and stores may write to,
  // zeroed. Pinned and counted nowhere where the device is not the host, else memory()'s buffers.
  virtual absl::StatusOr<Buffer> AllocateHost(size_t bytes) = 0;
  // The stream that Ops work on. Lives as long as the device.
  virtual Stream* compute() = 0;
  virtual std::unique_ptr<Stream> NewStream(const std::string& name) = 0;
  // Whether the host may read and write memory of the device.
  virtual bool is_host() const = 0;
  virtual const MemoryAccounting& memory() const = 0;
  virtual std::string name() const = 0;  // "cpu", "cuda:0"
  // OK, or what has made the device useless to this process for good: all that is asked of it fails
  // from then on. DATA_LOSS where the hardware is at fault, else a kernel was, most likely.
  virtual absl::Status Broken() const { return absl::OkStatus(); }

  // Null where the compute stream runs on the caller's thread: the host's clock serves there.
  virtual std::unique_ptr<LapTimer> NewLapTimer() { return nullptr; }
  // Name what the calling thread does in between, for the device's profiler; ranges nest. Nothing
  // happens where there is none.
  virtual void BeginRange(const std::string& name) {}
  virtual void EndRange() {}
};

// Copies on the compute stream, after what was enqueued there before, and waits for it.
inline absl::Status CopyAndWait(Device* device, void* to, const void* from, size_t bytes) {
  return device->compute()->Copy(to, from, bytes).Wait();
}

std::unique_ptr<Device> MakeCpuDevice();

}  // namespace zeroshard
