#include "tests/worker/device/cuda/fake_runtime.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "gtest/gtest.h"

namespace zeroshard::cuda {
namespace {

constexpr uint8_t kFresh = 0xCD;
constexpr uint8_t kFreed = 0xDD;

}  // namespace

FakeRuntime::FakeRuntime() {
  devices = {{.name = "Fake A100",
              .major = 8,
              .minor = 0,
              .total_bytes = device_bytes,
              .multiprocessors = 108,
              .memory_pools = true}};
}

FakeRuntime::~FakeRuntime() {
  EXPECT_EQ(waits_for_nothing_, 0) << "a stream waited for an event that was never recorded";
  if (broken_ != Error::kOk) return;  // nothing can be given back then
  EXPECT_TRUE(streams_.empty()) << "streams were not destroyed";
  EXPECT_TRUE(events_.empty()) << "events were not destroyed";
  EXPECT_TRUE(pools_.empty()) << "pools were not destroyed";
  EXPECT_TRUE(pinned_.empty()) << "pinned memory was not freed";
  for (const auto& piece : pieces_) EXPECT_FALSE(piece->used) << "device memory was not freed";
}

void FakeRuntime::Fail(const std::string& call, Error error, int times) {
  std::lock_guard lock(mutex_);
  for (int i = 0; i < times; ++i) failures_[call].push_back(error);
}

void FakeRuntime::Break(Error error) {
  std::lock_guard lock(mutex_);
  broken_ = error;
}

int FakeRuntime::Calls(const std::string& call) const {
  std::lock_guard lock(mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}

size_t FakeRuntime::reserved_bytes() const {
  std::lock_guard lock(mutex_);
  return Reserved();
}

StreamHandle FakeRuntime::Named(const std::string& name) const {
  std::lock_guard lock(mutex_);
  for (const auto& [handle, queue] : streams_) {
    if (queue.name == name) return handle;
  }
  ADD_FAILURE() << "no stream is named " << name;
  return nullptr;
}

bool FakeRuntime::HighPriority(StreamHandle stream) const {
  std::lock_guard lock(mutex_);
  return streams_.at(stream).high_priority;
}

void FakeRuntime::TakeTime(StreamHandle stream, double milliseconds) {
  std::lock_guard lock(mutex_);
  Enqueue(stream,
          {.run = [this, stream, milliseconds] { streams_.at(stream).clock += milliseconds; }});
}

Error FakeRuntime::Enter(const char* call) {
  ++calls_[call];
  if (broken_ != Error::kOk) return broken_;
  auto& failures = failures_[call];
  if (failures.empty()) return Error::kOk;
  const Error error = failures.front();
  failures.pop_front();
  return error;
}

Error FakeRuntime::Enqueue(StreamHandle stream, Operation operation) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    ADD_FAILURE() << "work for a stream that does not exist";
    return Error::kInvalidValue;
  }
  found->second.operations.push_back(std::move(operation));
  return Error::kOk;
}

void FakeRuntime::RunNext(Queue* queue) {
  Operation operation = std::move(queue->operations.front());
  queue->operations.pop_front();
  if (operation.awaits) {
    RunUntil(*operation.awaits);
    queue->clock = std::max(queue->clock, operation.awaits->at);
  }
  if (operation.run) operation.run();
}

void FakeRuntime::RunUntil(const Record& record) {
  while (!record.done) {
    Queue& queue = streams_.at(record.stream);
    if (queue.operations.empty()) {
      ADD_FAILURE() << "this event would never be done";
      return;
    }
    RunNext(&queue);
  }
}

const char* FakeRuntime::ErrorName(Error error) {
  switch (error) {
    case Error::kOutOfMemory:
      return "cudaErrorMemoryAllocation";
    case Error::kIllegalAddress:
      return "cudaErrorIllegalAddress";
    case Error::kInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case Error::kNoDevice:
      return "cudaErrorNoDevice";
    default:
      return "cudaErrorOther";
  }
}

const char* FakeRuntime::ErrorText(Error error) {
  return error == Error::kIllegalAddress ? "an illegal memory access was encountered" : "text";
}

Error FakeRuntime::DriverVersion(int* version) {
  *version = driver_version;
  return Error::kOk;
}

Error FakeRuntime::RuntimeVersion(int* version) {
  *version = 13000;
  return Error::kOk;
}

Error FakeRuntime::DeviceCount(int* count) {
  std::lock_guard lock(mutex_);
  *count = static_cast<int>(devices.size());
  return Enter("DeviceCount");
}

Error FakeRuntime::Properties(int ordinal, DeviceProperties* properties) {
  std::lock_guard lock(mutex_);
  *properties = devices.at(static_cast<size_t>(ordinal));
  return Enter("Properties");
}

Error FakeRuntime::SetDevice(int ordinal) {
  std::lock_guard lock(mutex_);
  EXPECT_LT(static_cast<size_t>(ordinal), devices.size());
  return Enter("SetDevice");
}

size_t FakeRuntime::Reserved() const {
  size_t bytes = 0;
  for (const auto& piece : pieces_) bytes += piece->bytes;
  return bytes;
}

Error FakeRuntime::MemoryInfo(size_t* free, size_t* total) {
  std::lock_guard lock(mutex_);
  *total = device_bytes;
  *free = device_bytes - Reserved();
  return Enter("MemoryInfo");
}

Error FakeRuntime::CreatePool(int /*ordinal*/, PoolHandle* pool) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("CreatePool"); error != Error::kOk) return error;
  *pool = reinterpret_cast<PoolHandle>(next_handle_ += 16);
  pools_.insert(*pool);
  return Error::kOk;
}

Error FakeRuntime::DestroyPool(PoolHandle pool) {
  std::lock_guard lock(mutex_);
  EXPECT_EQ(pools_.erase(pool), 1u);
  return Enter("DestroyPool");
}

Error FakeRuntime::TrimPool(PoolHandle /*pool*/, size_t /*keep_bytes*/) {
  std::lock_guard lock(mutex_);
  std::erase_if(pieces_, [](const auto& piece) { return !piece->used && piece->free_ran; });
  return Enter("TrimPool");
}

FakeRuntime::Piece* FakeRuntime::FindFree(size_t bytes, StreamHandle stream) {
  for (const auto& piece : pieces_) {
    const bool ready = piece->free_ran || piece->freed_on == stream;
    if (!piece->used && ready && piece->bytes == bytes) return piece.get();
  }
  return nullptr;
}

Error FakeRuntime::AllocateAsync(void** data, size_t bytes, PoolHandle pool, StreamHandle stream) {
  std::lock_guard lock(mutex_);
  EXPECT_TRUE(pools_.contains(pool));
  if (const Error error = Enter("AllocateAsync"); error != Error::kOk) return error;
  Piece* piece = FindFree(bytes, stream);
  if (piece == nullptr) {
    if (Reserved() + bytes > device_bytes) return Error::kOutOfMemory;
    pieces_.push_back(std::make_shared<Piece>());
    piece = pieces_.back().get();
    piece->bytes = bytes;
    piece->memory = std::make_unique<uint8_t[]>(bytes);
    std::memset(piece->memory.get(), kFresh, bytes);
  }
  piece->used = true;
  *data = piece->memory.get();
  return Error::kOk;
}

Error FakeRuntime::FreeAsync(void* data, StreamHandle stream) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("FreeAsync"); error != Error::kOk) return error;
  for (const auto& piece : pieces_) {
    if (piece->memory.get() != data) continue;
    EXPECT_TRUE(piece->used) << "freed twice";
    piece->used = false;
    piece->free_ran = false;
    piece->freed_on = stream;
    return Enqueue(stream, {.run = [piece] {
                     std::memset(piece->memory.get(), kFreed, piece->bytes);
                     piece->free_ran = true;
                   }});
  }
  ADD_FAILURE() << "freed memory that is none";
  return Error::kInvalidValue;
}

Error FakeRuntime::HostAllocate(void** data, size_t bytes) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("HostAllocate"); error != Error::kOk) return error;
  size_t pinned = bytes;
  for (const auto& [of, size] : pinned_bytes_) pinned += size;
  if (pinned > host_bytes) return Error::kOutOfMemory;
  auto memory = std::make_unique<uint8_t[]>(bytes);
  std::memset(memory.get(), kFresh, bytes);
  *data = memory.get();
  pinned_bytes_[*data] = bytes;
  pinned_[*data] = std::move(memory);
  return Error::kOk;
}

Error FakeRuntime::HostFree(void* data) {
  std::lock_guard lock(mutex_);
  EXPECT_EQ(pinned_.erase(data), 1u);
  pinned_bytes_.erase(data);
  return Enter("HostFree");
}

Error FakeRuntime::SetAsync(void* data, int value, size_t bytes, StreamHandle stream) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("SetAsync"); error != Error::kOk) return error;
  return Enqueue(stream, {.run = [=] { std::memset(data, value, bytes); }});
}

Error FakeRuntime::CopyAsync(void* to, const void* from, size_t bytes, StreamHandle stream) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("CopyAsync"); error != Error::kOk) return error;
  return Enqueue(stream, {.run = [=] { std::memmove(to, from, bytes); }});
}

Error FakeRuntime::CreateStream(bool high_priority, StreamHandle* stream) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("CreateStream"); error != Error::kOk) return error;
  *stream = reinterpret_cast<StreamHandle>(next_handle_ += 16);
  streams_[*stream].high_priority = high_priority;
  return Error::kOk;
}

Error FakeRuntime::DestroyStream(StreamHandle stream) {
  std::lock_guard lock(mutex_);
  EXPECT_EQ(streams_.erase(stream), 1u);
  return Enter("DestroyStream");
}

Error FakeRuntime::SynchronizeStream(StreamHandle stream) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("SynchronizeStream"); error != Error::kOk) return error;
  Queue& queue = streams_.at(stream);
  while (!queue.operations.empty()) RunNext(&queue);
  return Error::kOk;
}

Error FakeRuntime::WaitEvent(StreamHandle stream, EventHandle event) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("WaitEvent"); error != Error::kOk) return error;
  const std::shared_ptr<Record>& record = events_.at(event);
  if (!record) {
    ++waits_for_nothing_;
    return Error::kOk;
  }
  return Enqueue(stream, {.awaits = record});
}

void FakeRuntime::NameStream(StreamHandle stream, const std::string& name) {
  std::lock_guard lock(mutex_);
  streams_.at(stream).name = name;
}

Error FakeRuntime::CreateEvent(EventHandle* event) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("CreateEvent"); error != Error::kOk) return error;
  *event = reinterpret_cast<EventHandle>(next_handle_ += 16);
  events_[*event] = nullptr;
  return Error::kOk;
}

Error FakeRuntime::DestroyEvent(EventHandle event) {
  std::lock_guard lock(mutex_);
  EXPECT_EQ(events_.erase(event), 1u);
  return Enter("DestroyEvent");
}

Error FakeRuntime::RecordEvent(EventHandle event, StreamHandle stream) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("RecordEvent"); error != Error::kOk) return error;
  auto record = std::make_shared<Record>();
  record->stream = stream;
  events_.at(event) = record;
  return Enqueue(stream, {.run = [this, record] {
                   record->at = streams_.at(record->stream).clock;
                   record->done = true;
                 }});
}

Error FakeRuntime::QueryEvent(EventHandle event) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("QueryEvent"); error != Error::kOk) return error;
  const std::shared_ptr<Record>& record = events_.at(event);
  return !record || record->done ? Error::kOk : Error::kNotReady;
}

Error FakeRuntime::SynchronizeEvent(EventHandle event) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("SynchronizeEvent"); error != Error::kOk) return error;
  // A copy: the event may be recorded anew meanwhile.
  if (const std::shared_ptr<Record> record = events_.at(event)) RunUntil(*record);
  return Error::kOk;
}

Error FakeRuntime::CreateTimedEvent(EventHandle* event) {
  const Error error = CreateEvent(event);
  std::lock_guard lock(mutex_);
  if (error == Error::kOk) timed_.insert(*event);
  return error;
}

Error FakeRuntime::ElapsedTime(EventHandle from, EventHandle to, float* milliseconds) {
  std::lock_guard lock(mutex_);
  if (const Error error = Enter("ElapsedTime"); error != Error::kOk) return error;
  if (!timed_.contains(from) || !timed_.contains(to)) return Error::kInvalidValue;
  const std::shared_ptr<Record> begin = events_.at(from), end = events_.at(to);
  if (!begin || !end) return Error::kInvalidValue;
  if (!begin->done || !end->done) return Error::kNotReady;
  *milliseconds = static_cast<float>(end->at - begin->at);
  return Error::kOk;
}

}  // namespace zeroshard::cuda
