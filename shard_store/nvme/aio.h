// Reads and writes that go on by themselves and call back, over io_uring; where the kernel or a
// container refuses io_uring (ENOSYS, EPERM, EACCES, or a kernel before 5.11), over threads that
// call pread and pwrite. Which of them is logged once.
//
// At most `depth` operations are in the kernel's hands at a time; what comes on top waits in a
// queue, whose length the buffers bound (each operation owns one). Short reads and writes go on
// where they ended, EINTR and EAGAIN are tried again.
//
// A device that does not answer is an error like others: an operation that the kernel has had for
// `stall_limit` ends with DEADLINE_EXCEEDED, and with it every one that waits or comes later. Its
// buffer is not given back before the kernel lets go of it, since the device may still write there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shard_store/nvme/buffers.h"
#include "shard_store/nvme/direct_file.h"
#include "shard_store/nvme/io_counters.h"

namespace zeroshard::nvme {

struct Operation;

struct AsyncIoOptions {
  int depth = 32;  // 1 to 1024
  absl::Duration stall_limit = absl::Seconds(30);
  enum class Engine { kAny, kRing, kThreads } engine = Engine::kAny;
  int threads = 8;                 // of the fallback, at most `depth`
  IoCounters* counters = nullptr;  // outlives this; null: nothing is counted
  DiskHook* hook = nullptr;        // outlives this; tests alone
  // How threads begin; null: std::thread. May throw what that does. Others: tests alone.
  std::function<std::thread(std::function<void()>)> start_thread;
};

// Thread-safe.
class AsyncIo {
 public:
  // Called once for every operation, on this class's threads, with no lock held: it must not wait,
  // and may start other operations. The buffer is that of the operation; none after
  // DEADLINE_EXCEEDED. Errors name path, offset, bytes and what errno says. A read past the file's
  // end is DATA_LOSS.
  using Done = std::function<void(absl::Status status, IoBuffer buffer)>;

  // `arena` is registered with the kernel where that is allowed (RLIMIT_MEMLOCK); buffers of others
  // work too. UNAVAILABLE: kRing was asked for and is refused. RESOURCE_EXHAUSTED: the system has
  // no thread more.
  static absl::StatusOr<std::unique_ptr<AsyncIo>> Create(const AsyncIoOptions& options,
                                                         std::shared_ptr<BufferArena> arena);
  // Ends what was started, within `stall_limit`.
  virtual ~AsyncIo() = default;

  // The first `bytes` of the buffer; offset and bytes are multiples of kAlignment.
  void Read(std::shared_ptr<const DirectFile> file, uint64_t offset, uint32_t bytes,
            IoBuffer buffer, Done done);
  void Write(std::shared_ptr<const DirectFile> file, uint64_t offset, uint32_t bytes,
             IoBuffer buffer, Done done);

  virtual const char* engine() const = 0;  // "io_uring" or "threads"
  // What was read is not what was written.
  void CountDamage() const {
    if (counters_ != nullptr) ++counters_->errors;
  }

 private:
  void Start(bool write, std::shared_ptr<const DirectFile> file, uint64_t offset, uint32_t bytes,
             IoBuffer buffer, Done done);
  virtual void Submit(std::unique_ptr<Operation> operation) = 0;
  IoCounters* counters_ = nullptr;
};

// Within this folder. UNAVAILABLE: the kernel, or a container around it, refuses io_uring.
absl::StatusOr<std::unique_ptr<AsyncIo>> MakeRingIo(const AsyncIoOptions& options,
                                                    std::shared_ptr<BufferArena> arena);
absl::StatusOr<std::unique_ptr<AsyncIo>> MakeThreadIo(const AsyncIoOptions& options);
// RESOURCE_EXHAUSTED: the system has no thread more.
absl::Status StartIoThread(const AsyncIoOptions& options, std::function<void()> run,
                           std::thread* thread);

}  // namespace zeroshard::nvme
