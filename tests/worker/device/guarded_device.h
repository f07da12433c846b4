// A device for tests whose memory the host cannot reach and whose work is done later, so that on
// the CPU too a pointer of the wrong kind is a crash and an event that was forgotten shows as wrong
// data.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "worker/device/cpu_memory.h"
#include "worker/device/device.h"
#include "worker/device/host_stream.h"

namespace zeroshard {

// When a stream's work is done: at once; when somebody waits for it (or after a while, for who only
// asks whether it is done); or after short random delays.
enum class Schedule : uint8_t { kEager, kLazy, kDelayed };

// Thread-safe. Memory is accounted as the CPU's. A freed buffer is overwritten once the compute
// stream has done what was enqueued there before.
class GuardedDevice : public Device {
 public:
  // The schedule of all streams is seed mod 3; the delays follow from the seed too.
  explicit GuardedDevice(uint64_t seed);
  ~GuardedDevice() override;

  // Reserved addresses without any access.
  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override;
  // The process ends where it is freed while a copy to or from it is under way.
  absl::StatusOr<Buffer> AllocateHost(size_t bytes) override;
  HostStream* compute() override { return compute_.get(); }
  std::unique_ptr<Stream> NewStream(const std::string& name) override;
  bool is_host() const override { return false; }
  const MemoryAccounting& memory() const override { return *accounting_; }
  std::string name() const override { return "guarded"; }

  Schedule schedule() const { return schedule_; }
  // Where the host finds what a device pointer points to, also to the end of a buffer. Null stays
  // null. The process ends where that is no memory of this device, or no more.
  void* HostView(const void* device) const;

 private:
  friend class GuardedStream;
  struct Live {
    char* view = nullptr;
    size_t bytes = 0;
  };
  struct Host {
    size_t bytes = 0;
    std::shared_ptr<std::atomic<int>> copies;  // under way
  };
  // Null where it is none of this device's.
  char* Find(const void* device) const;
  // Keeps a copy counted that uses this memory, where AllocateHost made it.
  std::shared_ptr<void> CountCopy(const void* host) const;
  void ForgetHost(const char* begin);
  std::unique_ptr<HostStream> MakeStream(const std::string& name);

  const uint64_t seed_;
  const Schedule schedule_;
  const std::shared_ptr<cpu::AtomicAccounting> accounting_;
  mutable std::mutex mutex_;
  std::map<const char*, Live> live_;  // by the device's address
  std::map<const char*, Host> host_;
  uint64_t streams_ = 0;
  std::unique_ptr<HostStream> compute_;
};

}  // namespace zeroshard
