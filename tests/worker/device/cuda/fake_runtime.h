// A CUDA runtime without a GPU: device memory is the host's, and a stream is a queue of which only
// that runs, and only then, what someone on the host waits for, so that a dependency that is
// missing between two streams shows as wrong bytes. Time is what TakeTime says: each stream has a
// clock, which a wait for another stream's event moves on to that one's.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "worker/device/cuda/runtime.h"

namespace zeroshard::cuda {

// Thread-safe.
class FakeRuntime : public Runtime {
 public:
  FakeRuntime();
  // Fails the test where something was not given back, or a stream waited for an event that was
  // never recorded (which CUDA takes for done).
  ~FakeRuntime() override;

  // Before use.
  std::vector<DeviceProperties> devices;
  size_t device_bytes = size_t{1} << 20;
  size_t host_bytes = size_t{1} << 20;
  int driver_version = 13000;

  // The next `times` calls of this name ("CopyAsync") return `error`.
  void Fail(const std::string& call, Error error, int times = 1);
  // Every call that touches the device returns this from now on.
  void Break(Error error);
  // How often a call was made.
  int Calls(const std::string& call) const;
  size_t reserved_bytes() const;  // by pools, in use or free
  StreamHandle Named(const std::string& name) const;
  bool HighPriority(StreamHandle stream) const;
  // Work that takes so long, behind what the stream has.
  void TakeTime(StreamHandle stream, double milliseconds);

  const char* ErrorName(Error error) override;
  const char* ErrorText(Error error) override;
  Error DriverVersion(int* version) override;
  Error RuntimeVersion(int* version) override;
  Error DeviceCount(int* count) override;
  Error Properties(int ordinal, DeviceProperties* properties) override;
  Error SetDevice(int ordinal) override;
  Error MemoryInfo(size_t* free, size_t* total) override;
  Error CreatePool(int ordinal, PoolHandle* pool) override;
  Error DestroyPool(PoolHandle pool) override;
  Error TrimPool(PoolHandle pool, size_t keep_bytes) override;
  Error AllocateAsync(void** data, size_t bytes, PoolHandle pool, StreamHandle stream) override;
  Error FreeAsync(void* data, StreamHandle stream) override;
  Error HostAllocate(void** data, size_t bytes) override;
  Error HostFree(void* data) override;
  Error SetAsync(void* data, int value, size_t bytes, StreamHandle stream) override;
  Error CopyAsync(void* to, const void* from, size_t bytes, StreamHandle stream) override;
  Error CreateStream(bool high_priority, StreamHandle* stream) override;
  Error DestroyStream(StreamHandle stream) override;
  Error SynchronizeStream(StreamHandle stream) override;
  Error WaitEvent(StreamHandle stream, EventHandle event) override;
  void NameStream(StreamHandle stream, const std::string& name) override;
  Error CreateEvent(EventHandle* event) override;
  Error DestroyEvent(EventHandle event) override;
  Error RecordEvent(EventHandle event, StreamHandle stream) override;
  Error QueryEvent(EventHandle event) override;
  Error SynchronizeEvent(EventHandle event) override;
  Error CreateTimedEvent(EventHandle* event) override;
  Error ElapsedTime(EventHandle from, EventHandle to, float* milliseconds) override;

 private:
  // One record of an event: a wait is for the record that it found.
  struct Record {
    StreamHandle stream = nullptr;
    bool done = false;
    double at = 0;  // milliseconds of the stream's clock
  };
  struct Operation {
    std::function<void()> run = nullptr;       // or
    std::shared_ptr<Record> awaits = nullptr;  // holds the stream back
  };
  struct Queue {
    bool high_priority = false;
    std::string name;
    std::deque<Operation> operations;
    double clock = 0;
  };
  // A piece of a pool, in use or free. One that is free serves the stream that freed it at once,
  // any other only once the free has run.
  struct Piece {
    std::unique_ptr<uint8_t[]> memory;
    size_t bytes = 0;
    bool used = false, free_ran = true;
    StreamHandle freed_on = nullptr;
  };

  Error Enter(const char* call);  // under mutex_
  Error Enqueue(StreamHandle stream, Operation operation);
  void RunNext(Queue* queue);
  void RunUntil(const Record& record);
  Piece* FindFree(size_t bytes, StreamHandle stream);
  size_t Reserved() const;

  mutable std::mutex mutex_;
  std::map<std::string, std::deque<Error>> failures_;
  std::map<std::string, int> calls_;
  Error broken_ = Error::kOk;
  uintptr_t next_handle_ = 0x1000;
  std::map<StreamHandle, Queue> streams_;
  std::map<EventHandle, std::shared_ptr<Record>> events_;
  std::set<EventHandle> timed_;
  std::set<PoolHandle> pools_;
  std::vector<std::shared_ptr<Piece>> pieces_;
  std::map<void*, std::unique_ptr<uint8_t[]>> pinned_;
  std::map<void*, size_t> pinned_bytes_;
  int waits_for_nothing_ = 0;
};

}  // namespace zeroshard::cuda
